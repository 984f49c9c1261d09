//! Reports of broken promises.

use std::fmt;

use super::CallId;

/// A promise that a history breaks.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Rule {
    /// Some sequence of the calls on an object explains all answers.
    Linearizable,
    /// The search for a sequence ends. Otherwise it took too many steps, and proves nothing.
    SearchEnds,
    /// An error occurs only if its cause is possible.
    ExpectedError,
    /// An answer is of the kind that the request asks for.
    ExpectedAnswer,
    /// A read returns only data that was written to the object.
    DataOrigin,
    /// A full target keeps enough space for removals.
    Reserve,
    /// A listing contains only names of objects, and each name once. An ordered listing is in order.
    Listing,
    /// A call ends at its deadline at the latest.
    Ends,
    /// A call that starts after all faults are healed is answered.
    Answered,
    /// After all faults are healed, the node restores the redundancy of all pools.
    Redundancy,
    /// A user does what was granted, and nothing after it was revoked.
    Rights,
    /// Nothing of a fenced owner takes effect.
    Fence,
    /// The structure of each target is intact.
    Structure,
}

/// A broken promise.
#[derive(Debug, Clone)]
pub struct Violation {
    /// The promise.
    pub rule: Rule,
    /// The object, if the promise concerns one object.
    pub object: Option<wire::ObjectName>,
    /// The calls that contradict one another or the promise.
    pub calls: Vec<CallId>,
    /// The report, with the calls and the expected and actual answers.
    pub text: String,
}

impl fmt::Display for Violation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "violation of {:?}", self.rule)?;
        if let Some(object) = &self.object {
            write!(f, " on object {object}")?;
        }
        write!(f, ": {}", self.text)
    }
}
