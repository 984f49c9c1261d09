//! Planted bugs, which show that the simulator finds bugs.
//!
//! A build with `--cfg mutants` contains the bugs, and [`plant`] chooses the one that is active on
//! the current thread. All other builds contain none of them: [`mutant!`](crate::mutant!) is then
//! the constant `false`.

use std::cell::Cell;
use std::str::FromStr;
use std::sync::atomic::{AtomicUsize, Ordering};

/// A planted bug.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Mutant {
    /// The store acknowledges a transaction before the flush of the drive.
    AcknowledgeBeforeFlush,
    /// The osd does not record the result of a request in the request's transaction.
    DropRequestRecord,
    /// An array does not roll back a transaction that only some members have.
    SkipUndo,
    /// An array rolls back a transaction that all members have.
    RollBackAcknowledged,
    /// The proxy uses a buffer again whose transfer is overdue.
    ReuseQuarantinedBuffer,
    /// An array accepts a membership record that is not the newest one.
    AcceptOldRecord,
    /// The recovery of a target takes damage in the flushed part of the log for a torn tail.
    DamageAsTornTail,
    /// The osd keeps the cached state of objects when the store begins a new incarnation.
    KeepCacheAtFailover,
    /// A connection whose transport breaks forgets its last message, and delivers it again.
    DeliverTwice,
    /// An array does not update the parity of a partial write.
    SkipParity,
    /// The host uses payload that arrived by DMA without verifying it.
    TrustTransferredPayload,
    /// The host computes the parity of data without verifying the data.
    CodeUnverifiedData,
    /// An array computes a lost fragment from other fragments without verifying them.
    RecoverFromUnverified,
    /// The osd uses a target that has gone back to an earlier state.
    TrustReturnedTarget,
    /// An array takes the newest record of the available members for the last one, without the
    /// witness.
    IgnoreWitness,
    /// The osd answers that a condition does not hold before the change that it has seen is
    /// durable.
    AnswerBeforeDurable,
    /// A read does not wait for a pending change that overlaps its range.
    ReadOvertakesWrite,
    /// The store executes a change although a change from which it was computed has failed.
    CommitDependentChange,
    /// The osd looks for the result of an earlier attempt only among the results that the same shard
    /// has recorded.
    LookOnOldShard,
    /// The osd executes changes of sessions that have ended.
    IgnoreFence,
    /// The osd does not check the right to read.
    PermitReads,
    /// The osd does not check the right to write.
    PermitWrites,
    /// The osd does not check the right to list.
    PermitLists,
    /// A change may compare data without the right to read.
    CompareWithoutRead,
    /// A grant on a part of a pool covers the whole pool.
    IgnorePrefix,
    /// Each user administers the own tenant.
    PermitAdmin,
    /// Each user administers the pools of the own tenant.
    PermitPoolAdmin,
    /// Each user administers the node.
    PermitNodeAdmin,
    /// A tenant that an operator names counts as the operator's own.
    IgnoreTenantName,
    /// A user may issue capabilities with rights that the user lacks.
    WidenCapabilities,
    /// An administrator of the node gets capabilities with all rights.
    NodeAdminReads,
    /// A name of a pool may mean a pool of another tenant.
    CrossTenants,
    /// The osd accepts capabilities whose time is over.
    IgnoreExpiry,
    /// The osd accepts capabilities from before a change of the user's rights.
    IgnoreRevision,
    /// A request may name any third party's memory.
    PermitForeignMemory,
    /// The control plane serves clients with unknown keys.
    ServeUnknownKeys,
}

impl Mutant {
    /// The planted bugs that simulations find.
    pub const ALL: [Mutant; 20] = [
        Mutant::AcknowledgeBeforeFlush,
        Mutant::DropRequestRecord,
        Mutant::SkipUndo,
        Mutant::RollBackAcknowledged,
        Mutant::ReuseQuarantinedBuffer,
        Mutant::AcceptOldRecord,
        Mutant::DamageAsTornTail,
        Mutant::KeepCacheAtFailover,
        Mutant::DeliverTwice,
        Mutant::SkipParity,
        Mutant::TrustTransferredPayload,
        Mutant::CodeUnverifiedData,
        Mutant::RecoverFromUnverified,
        Mutant::TrustReturnedTarget,
        Mutant::IgnoreWitness,
        Mutant::AnswerBeforeDurable,
        Mutant::ReadOvertakesWrite,
        Mutant::CommitDependentChange,
        Mutant::LookOnOldShard,
        Mutant::IgnoreFence,
    ];

    /// The planted errors in permissions, which the tests of rights find.
    pub const PERMISSIONS: [Mutant; 16] = [
        Mutant::PermitReads,
        Mutant::PermitWrites,
        Mutant::PermitLists,
        Mutant::CompareWithoutRead,
        Mutant::IgnorePrefix,
        Mutant::PermitAdmin,
        Mutant::PermitPoolAdmin,
        Mutant::PermitNodeAdmin,
        Mutant::IgnoreTenantName,
        Mutant::WidenCapabilities,
        Mutant::NodeAdminReads,
        Mutant::CrossTenants,
        Mutant::IgnoreExpiry,
        Mutant::IgnoreRevision,
        Mutant::PermitForeignMemory,
        Mutant::ServeUnknownKeys,
    ];

    /// The bug's name for command lines.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Mutant::AcknowledgeBeforeFlush => "acknowledge-before-flush",
            Mutant::DropRequestRecord => "drop-request-record",
            Mutant::SkipUndo => "skip-undo",
            Mutant::RollBackAcknowledged => "roll-back-acknowledged",
            Mutant::ReuseQuarantinedBuffer => "reuse-quarantined-buffer",
            Mutant::AcceptOldRecord => "accept-old-record",
            Mutant::DamageAsTornTail => "damage-as-torn-tail",
            Mutant::KeepCacheAtFailover => "keep-cache-at-failover",
            Mutant::DeliverTwice => "deliver-twice",
            Mutant::SkipParity => "skip-parity",
            Mutant::TrustTransferredPayload => "trust-transferred-payload",
            Mutant::CodeUnverifiedData => "code-unverified-data",
            Mutant::RecoverFromUnverified => "recover-from-unverified",
            Mutant::TrustReturnedTarget => "trust-returned-target",
            Mutant::IgnoreWitness => "ignore-witness",
            Mutant::AnswerBeforeDurable => "answer-before-durable",
            Mutant::ReadOvertakesWrite => "read-overtakes-write",
            Mutant::CommitDependentChange => "commit-dependent-change",
            Mutant::LookOnOldShard => "look-on-old-shard",
            Mutant::IgnoreFence => "ignore-fence",
            Mutant::PermitReads => "permit-reads",
            Mutant::PermitWrites => "permit-writes",
            Mutant::PermitLists => "permit-lists",
            Mutant::CompareWithoutRead => "compare-without-read",
            Mutant::IgnorePrefix => "ignore-prefix",
            Mutant::PermitAdmin => "permit-admin",
            Mutant::PermitPoolAdmin => "permit-pool-admin",
            Mutant::PermitNodeAdmin => "permit-node-admin",
            Mutant::IgnoreTenantName => "ignore-tenant-name",
            Mutant::WidenCapabilities => "widen-capabilities",
            Mutant::NodeAdminReads => "node-admin-reads",
            Mutant::CrossTenants => "cross-tenants",
            Mutant::IgnoreExpiry => "ignore-expiry",
            Mutant::IgnoreRevision => "ignore-revision",
            Mutant::PermitForeignMemory => "permit-foreign-memory",
            Mutant::ServeUnknownKeys => "serve-unknown-keys",
        }
    }
}

impl FromStr for Mutant {
    type Err = String;

    fn from_str(name: &str) -> Result<Mutant, String> {
        let mut all = Mutant::ALL.into_iter().chain(Mutant::PERMISSIONS);
        all.find(|mutant| mutant.name() == name).ok_or_else(|| {
            let names: Vec<_> = Mutant::ALL.iter().map(|mutant| mutant.name()).collect();
            format!("{name:?} is not a planted bug; the planted bugs are {}", names.join(", "))
        })
    }
}

thread_local! {
    static PLANTED: Cell<Option<Mutant>> = const { Cell::new(None) };
}

/// Activates a planted bug on the current thread, or none. Has an effect only in a build with
/// `--cfg mutants`.
pub fn plant(mutant: Option<Mutant>) {
    PLANTED.set(mutant);
}

/// The bug that is active on all threads: its place in the enum plus 1, or 0 for none.
static EVERYWHERE: AtomicUsize = AtomicUsize::new(0);

/// Activates a planted bug on all threads, or none. Has an effect only in a build with
/// `--cfg mutants`.
pub fn plant_everywhere(mutant: Option<Mutant>) {
    EVERYWHERE.store(mutant.map_or(0, |mutant| mutant as usize + 1), Ordering::SeqCst);
}

/// Whether a planted bug is active on the current thread. Use [`mutant!`](crate::mutant!), which
/// costs nothing in ordinary builds.
#[must_use]
pub fn is_planted(mutant: Mutant) -> bool {
    PLANTED.get() == Some(mutant) || EVERYWHERE.load(Ordering::Relaxed) == mutant as usize + 1
}

/// Whether a planted bug is active. The argument is the name of a variant of
/// [`Mutant`](crate::mutant::Mutant).
#[macro_export]
macro_rules! mutant {
    ($name:ident) => {
        cfg!(mutants) && $crate::mutant::is_planted($crate::mutant::Mutant::$name)
    };
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_planted_bug_is_active_only_in_a_build_with_mutants() {
        assert!(Mutant::ALL.iter().all(|mutant| mutant.name().parse() == Ok(*mutant)));
        plant(Some(Mutant::SkipUndo));
        assert_eq!(crate::mutant!(SkipUndo), cfg!(mutants));
        assert!(!crate::mutant!(SkipParity));
        plant(None);
        assert!(!crate::mutant!(SkipUndo));
    }
}
