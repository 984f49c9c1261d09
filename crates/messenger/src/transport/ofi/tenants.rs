//! [`Tenants`]: what the tenants of a transport hold of its limited resources, which are protection
//! domains (with their queues) and receive buffers.
//!
//! A tenant at its limit gets no further links: its clients stay on their other transport. The limits
//! leave room for other tenants. See "Limits on peers" in `docs/protocol.md`.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError, Weak};

use base::collections::HashMap;

/// Part of all domains that one tenant may hold: one in this many.
const DOMAINS_SHARE: usize = 4;

/// Part of all domains beyond which a tenant gets only its first domain: one in this many.
const DOMAINS_SPARE: usize = 2;

/// Part of all receive buffers that is reserved for tenants that hold few: one in this many.
const RECEIVES_SPARE: usize = 8;

/// Part of all receive buffers up to which a tenant holds few: one in this many.
const RECEIVES_FEW: usize = 64;

/// On whose behalf a protection domain is opened.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) enum DomainOwner {
    /// This side, which dials.
    Own,
    /// The tenant with this number. A tenant that was removed and a new one of the same name have
    /// different numbers.
    Tenant(u32),
}

/// Error: a tenant holds as much as it may.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub(super) enum TenantLimit {
    #[error("the tenant has {held} protection domains, and all tenants together {all} of {limit}")]
    Domains { held: usize, all: usize, limit: usize },
    #[error("the tenant has {held} receive buffers, and all tenants together {all} of {limit}")]
    Receives { held: usize, all: usize, limit: usize },
}

impl TenantLimit {
    /// Counts the refusal, and returns the error.
    fn counted(self) -> TenantLimit {
        let reason = match self {
            TenantLimit::Domains { .. } => "domains",
            TenantLimit::Receives { .. } => "receives",
        };
        metrics::counter!("outboard_messenger_connections_refused_total", "reason" => reason).increment(1);
        self
    }
}

/// The tenants that hold resources of one transport.
pub(super) struct Tenants {
    totals: Arc<Totals>,
    uses: Mutex<HashMap<u32, Weak<TenantUse>>>,
}

/// What all tenants together hold, and may hold.
struct Totals {
    domains_max: usize,
    receives_max: usize,
    domains: AtomicUsize,
    receives: AtomicUsize,
    /// Held while a thread compares the numbers of domains with their limits and takes a domain.
    admission: Mutex<()>,
}

/// What one tenant holds.
pub(super) struct TenantUse {
    /// `None` for this side's own domains, which have no limits.
    totals: Option<Arc<Totals>>,
    domains: AtomicUsize,
    receives: AtomicUsize,
}

/// A tenant's right to one protection domain. Dropping this value returns the right.
pub(super) struct DomainSlot(Arc<TenantUse>);

/// A receive buffer that a tenant holds. Dropping this value ends the tenant's use.
pub(super) struct ReceiveSlot(Arc<TenantUse>);

impl Tenants {
    /// Creates the table of a transport with this many domains and receive buffers.
    pub(super) fn new(domains_max: usize, receives_max: usize) -> Tenants {
        let (domains, receives) = (AtomicUsize::new(0), AtomicUsize::new(0));
        let admission = Mutex::default();
        let totals = Arc::new(Totals { domains_max, receives_max, domains, receives, admission });
        Tenants { totals, uses: Mutex::default() }
    }

    /// Returns what `owner` holds.
    pub(super) fn of(&self, owner: DomainOwner) -> Arc<TenantUse> {
        let DomainOwner::Tenant(tenant) = owner else { return TenantUse::new(None) };
        // No code panics while it holds the mutex.
        let mut uses = self.uses.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(known) = uses.get(&tenant).and_then(Weak::upgrade) {
            return known;
        }
        uses.retain(|_, known| known.strong_count() > 0);
        let new = TenantUse::new(Some(Arc::clone(&self.totals)));
        uses.insert(tenant, Arc::downgrade(&new));
        new
    }

    /// Number of domains that all tenants hold.
    pub(super) fn domains(&self) -> usize {
        self.totals.domains.load(Ordering::Relaxed)
    }
}

impl TenantUse {
    fn new(totals: Option<Arc<Totals>>) -> Arc<TenantUse> {
        let (domains, receives) = (AtomicUsize::new(0), AtomicUsize::new(0));
        Arc::new(TenantUse { totals, domains, receives })
    }

    /// Takes one more domain.
    ///
    /// # Errors
    /// If the tenant holds its share, if it holds a domain and half of all domains are in use, or if
    /// all domains are in use.
    pub(super) fn take_domain(self: &Arc<Self>) -> Result<DomainSlot, TenantLimit> {
        let _admission =
            self.totals.as_ref().map(|t| t.admission.lock().unwrap_or_else(PoisonError::into_inner));
        let held = self.domains.load(Ordering::Relaxed);
        if let Some(totals) = &self.totals {
            let (all, limit) = (totals.domains.load(Ordering::Relaxed), totals.domains_max);
            let share = (limit / DOMAINS_SHARE).max(1);
            let may_have = if held == 0 { all < limit } else { held < share && all < limit / DOMAINS_SPARE };
            if !may_have {
                return Err(TenantLimit::Domains { held, all, limit }.counted());
            }
            totals.domains.fetch_add(1, Ordering::Relaxed);
        }
        self.domains.fetch_add(1, Ordering::Relaxed);
        Ok(DomainSlot(Arc::clone(self)))
    }

    /// Checks whether the tenant may hold `more` additional receive buffers. Threads that check at the
    /// same time may together exceed the limit by a few buffers.
    ///
    /// # Errors
    /// If the remaining buffers are reserved for tenants that hold fewer, or all are held.
    pub(super) fn check_receives(&self, more: usize) -> Result<(), TenantLimit> {
        let Some(totals) = &self.totals else { return Ok(()) };
        let held = self.receives.load(Ordering::Relaxed);
        let (all, limit) = (totals.receives.load(Ordering::Relaxed), totals.receives_max);
        let holds_few = held + more <= (limit / RECEIVES_FEW).max(more);
        let spare = if holds_few { 0 } else { limit / RECEIVES_SPARE };
        if all + more > limit - spare {
            return Err(TenantLimit::Receives { held, all, limit });
        }
        Ok(())
    }

    /// Like [`check_receives`](Self::check_receives), for a link that is refused otherwise.
    pub(super) fn admit_receives(&self, more: usize) -> Result<(), TenantLimit> {
        self.check_receives(more).map_err(TenantLimit::counted)
    }

    /// Counts one more receive buffer.
    pub(super) fn hold_receive(self: &Arc<Self>) -> ReceiveSlot {
        self.receives.fetch_add(1, Ordering::Relaxed);
        if let Some(totals) = &self.totals {
            totals.receives.fetch_add(1, Ordering::Relaxed);
        }
        ReceiveSlot(Arc::clone(self))
    }
}

impl DomainSlot {
    /// The tenant that holds the domain.
    pub(super) fn tenant(&self) -> &Arc<TenantUse> {
        &self.0
    }
}

impl Drop for DomainSlot {
    fn drop(&mut self) {
        let before = self.0.domains.fetch_sub(1, Ordering::Relaxed);
        assert!(before > 0, "a tenant returns only what it holds");
        if let Some(totals) = &self.0.totals {
            totals.domains.fetch_sub(1, Ordering::Relaxed);
        }
    }
}

impl Drop for ReceiveSlot {
    fn drop(&mut self) {
        let before = self.0.receives.fetch_sub(1, Ordering::Relaxed);
        assert!(before > 0, "a tenant returns only what it holds");
        if let Some(totals) = &self.0.totals {
            totals.receives.fetch_sub(1, Ordering::Relaxed);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn take_all(tenant: &Arc<TenantUse>) -> Vec<DomainSlot> {
        std::iter::from_fn(|| tenant.take_domain().ok()).collect()
    }

    #[test]
    fn a_tenant_with_all_its_domains_leaves_one_for_each_other_tenant() {
        let tenants = Tenants::new(16, 64);
        let of = |number| tenants.of(DomainOwner::Tenant(number));
        let (first, second) = (take_all(&of(1)), take_all(&of(2)));
        assert_eq!((first.len(), second.len()), (4, 4));
        // Half of the domains are in use: from here on, each tenant gets one.
        let others: Vec<Vec<DomainSlot>> = (3..20).map(|number| take_all(&of(number))).collect();
        assert_eq!(others.iter().map(Vec::len).collect::<Vec<_>>(), [[1; 8].as_slice(), &[0; 9]].concat());
        assert_eq!(of(3).take_domain().err(), Some(TenantLimit::Domains { held: 1, all: 16, limit: 16 }));
        drop(first);
        assert_eq!(tenants.domains(), 12);
        assert!(of(19).take_domain().is_ok(), "the domains of a tenant without links are free again");
        let own = tenants.of(DomainOwner::Own);
        assert!((0..100).all(|_| own.take_domain().is_ok()), "the own domains have no limit");
    }

    #[test]
    fn a_tenant_with_most_receive_buffers_leaves_some_for_each_other_tenant() {
        let tenants = Tenants::new(16, 640);
        let of = |number| tenants.of(DomainOwner::Tenant(number));
        let take_all = |number| -> Vec<ReceiveSlot> {
            let tenant = of(number);
            std::iter::from_fn(|| tenant.check_receives(1).is_ok().then(|| tenant.hold_receive())).collect()
        };
        let first = take_all(1);
        assert_eq!(first.len(), 560);
        let others: Vec<Vec<ReceiveSlot>> = (2..12).map(take_all).collect();
        assert_eq!(others.iter().map(Vec::len).collect::<Vec<_>>(), [[10; 8].as_slice(), &[0; 2]].concat());
        drop((first, others));
        assert_eq!(take_all(3).len(), 560, "the buffers of closed links are free again");
    }
}
