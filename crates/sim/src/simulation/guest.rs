//! A guest whose rights operators grant and revoke while faults occur. After a revocation, no change of
//! the guest may take effect; while the right is granted, the node may not refuse the guest.

use std::rc::Rc;
use std::time::Duration;

use client::{Client, NodeError, Options};
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};
use tokio::time::sleep;
use wire::{AccessGrant, AccountRequest, AdminRequest, PoolName, Scope, Verb, Verbs, Within};

use super::{FILLER, SHORT_TIMEOUT, Simulation};
use crate::history::Rule;
use crate::identities::{SimUser, guest_name};
use crate::plan::{RandomStream, rng};

/// Maximum pause between two steps.
const PAUSE_MAX: Duration = Duration::from_secs(4);

impl Simulation {
    /// Grants and revokes the guest's right to write, and lets the guest write, until the simulation is
    /// over. Each write has another content.
    pub(super) async fn guest(self: Rc<Simulation>) {
        let mut random = StdRng::from_rng(&mut rng(self.plan.seed, RandomStream::Guest));
        let pool = PoolName::new(&self.plan.pools[0].name).expect("the name is valid");
        let within = Within { namespace: FILLER.into(), prefix: "guest".into() };
        let scope = Scope::of(pool.clone(), Some(within));
        let operator = self.connect("guests-operator").await;
        let create = AccountRequest::CreateUser {
            user: guest_name(),
            key: self.node.identities().key(SimUser::Guest),
            is_node_admin: false,
        };
        if !self.settle(&operator, create).await {
            return;
        }
        let options = Options { request_timeout: SHORT_TIMEOUT, ..Options::default() };
        let Some(guest) = self.connect_as(SimUser::Guest, ("guest", None), options).await else { return };
        let mut content = 0_u64;
        while !self.is_over.get() {
            let lossy_starts = self.node.lossy_starts();
            let is_sure = || self.node.lossy_starts() == lossy_starts;
            let grant = AccessGrant { scope: scope.clone(), verbs: Verbs::of(Verb::Write) };
            if !self.settle(&operator, AccountRequest::Grant { user: guest_name(), grant }).await {
                break;
            }
            content += 1;
            match self.guest_writes(&guest, content).await {
                Ok(()) => self.count("guest: permitted writes"),
                Err(client::Error::Node(NodeError::NotPermitted { .. })) if is_sure() => {
                    self.violation(
                        Rule::Rights,
                        format!("write {content} was refused, although it was granted"),
                    );
                }
                Err(_) => {}
            }
            sleep(random.random_range(Duration::ZERO..PAUSE_MAX)).await;
            let revoke = AccountRequest::Revoke { user: guest_name(), scope: None, verbs: Verbs::ALL };
            if !self.settle(&operator, revoke).await {
                break;
            }
            content += 1;
            match self.guest_writes(&guest, content).await {
                Ok(()) if is_sure() => {
                    self.violation(Rule::Rights, format!("write {content} of a revoked user has succeeded"))
                }
                Err(client::Error::Node(NodeError::NotPermitted { .. })) => {
                    self.count("guest: refused writes")
                }
                Ok(()) | Err(_) => {}
            }
            if self.stored(&operator).await == Some(content) && is_sure() {
                self.violation(Rule::Rights, format!("write {content} of a revoked user has taken effect"));
            }
            sleep(random.random_range(Duration::ZERO..PAUSE_MAX)).await;
        }
        guest.close().await;
        operator.close().await;
    }

    async fn guest_writes(&self, guest: &Client, content: u64) -> client::Result<()> {
        let pool = guest.pool(&self.plan.pools[0].name)?.namespace(FILLER)?;
        let written = pool.object("guest")?.put(content.to_be_bytes().to_vec()).await.map(drop);
        let text = written.as_ref().map_or_else(ToString::to_string, |()| "ok".into());
        self.trace.event(format_args!("the guest's write {content} ends: {text}"));
        written
    }

    /// Returns the number of the guest's write that has taken effect last.
    async fn stored(&self, operator: &Client) -> Option<u64> {
        let pool = operator.pool(&self.plan.pools[0].name).ok()?.namespace(FILLER).ok()?;
        let bytes = pool.object("guest").ok()?.get().await.ok()?;
        Some(u64::from_be_bytes(bytes.as_ref().try_into().ok()?))
    }

    /// Repeats a change of accounts until it has certainly taken effect. Returns false if the simulation
    /// is over.
    async fn settle(&self, operator: &Client, request: AccountRequest) -> bool {
        while !self.is_over.get() {
            match operator.administer(AdminRequest::Accounts(request.clone())).await {
                Ok(_) | Err(client::Error::Node(NodeError::AccountExists(_))) => return true,
                Err(e) => self.trace.event(format_args!("the guest's account cannot be changed yet: {e}")),
            }
            sleep(Duration::from_millis(500)).await;
        }
        false
    }
}
