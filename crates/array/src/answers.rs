//! [`MemberAnswers`]: the outcome of a transaction that several members execute.

use store::StoreError;

use crate::member_link::is_refusal;

/// The answers of the members to one transaction of the array. This type is pure state.
#[derive(Debug, Default)]
pub(crate) struct MemberAnswers {
    /// Whether a member has committed the transaction.
    committed: bool,
    /// Why a member has refused the transaction.
    refused: Option<StoreError>,
    /// Why it is unknown whether a member has executed the transaction.
    unknown: Option<StoreError>,
}

/// Outcome of a failed transaction.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum TransactionFailure {
    /// The transaction has changed nothing.
    Nowhere(StoreError),
    /// Some members may have executed the transaction. A member may have refused it.
    Somewhere { error: StoreError, is_refused: bool },
}

impl MemberAnswers {
    /// Adds the answer of a member. Returns the error if it means that the member's target has failed.
    pub(crate) fn add(&mut self, answer: store::Result<()>) -> Option<StoreError> {
        match answer {
            Ok(()) => self.committed = true,
            Err(e) if is_refusal(&e) => self.refused = self.refused.take().or(Some(e)),
            Err(e @ StoreError::Disconnected(_)) => self.unknown = Some(e),
            Err(e) => {
                self.unknown = Some(StoreError::Disconnected(e.to_string()));
                return Some(e);
            }
        }
        None
    }

    /// Returns the outcome when all members have answered.
    pub(crate) fn outcome(self) -> Result<(), TransactionFailure> {
        match (self.unknown, self.refused) {
            (None, None) => Ok(()),
            (None, Some(e)) if !self.committed => Err(TransactionFailure::Nowhere(e)),
            (Some(error), refused) => {
                Err(TransactionFailure::Somewhere { error, is_refused: refused.is_some() })
            }
            (None, Some(error)) => Err(TransactionFailure::Somewhere { error, is_refused: true }),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn outcome(answers: &[Result<(), StoreError>]) -> Result<(), TransactionFailure> {
        let mut all = MemberAnswers::default();
        answers.iter().for_each(|answer| drop(all.add(answer.clone())));
        all.outcome()
    }

    #[test]
    fn a_transaction_has_changed_nothing_only_if_all_members_have_refused_it() {
        let (full, lost) = (StoreError::Exists("o".into()), StoreError::Disconnected("gone".into()));
        let (refuses, is_gone) = (Err(full.clone()), Err(lost.clone()));
        let somewhere = |error: &StoreError, is_refused| TransactionFailure::Somewhere {
            error: error.clone(),
            is_refused,
        };
        assert_eq!(outcome(&[Ok(()), Ok(())]), Ok(()));
        let nowhere = outcome(&[refuses.clone(), refuses.clone()]);
        assert_eq!(nowhere, Err(TransactionFailure::Nowhere(full.clone())));
        assert_eq!(outcome(&[Ok(()), refuses.clone()]), Err(somewhere(&full, true)));
        assert_eq!(outcome(&[Ok(()), is_gone.clone()]), Err(somewhere(&lost, false)));
        assert_eq!(outcome(&[refuses, is_gone]), Err(somewhere(&lost, true)));
    }

    #[test]
    fn an_error_that_is_no_refusal_means_that_the_target_has_failed() {
        let mut answers = MemberAnswers::default();
        assert_eq!(answers.add(Err(StoreError::Io("write".into()))), Some(StoreError::Io("write".into())));
        assert_eq!(answers.add(Err(StoreError::Disconnected("gone".into()))), None);
        let outcome = answers.outcome();
        assert!(matches!(outcome, Err(TransactionFailure::Somewhere { is_refused: false, .. })));
    }
}
