//! The simulated node: its drives, and the bodies of its roles.

use std::cell::RefCell;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use array::{CodingConfig, StripesAt};
use base::mem::Arena;
use base::pool::BufferPool;
use messenger::NetworkStack;
use osd::{OsdConfig, OsdServer};
use store::stripes::{EngineOptions, Engines};
use store::{MemStore, ObjectStore};
use uuid::Uuid;
use wire::Placement;

use crate::plan::{NodeRole, Plan};
use crate::role::Role;
use crate::trace::Trace;

/// Address at which the osd serves clients.
pub const ENDPOINT: &str = "node:7400";
/// Size of the osd's staging memory, in bytes.
const STAGING: usize = 32 << 20;
/// Largest staging buffer, in bytes: two segments of 2 MiB.
const LARGEST_BUFFER: usize = 4 << 20;
/// Time after which a role that has ended by itself is started again.
const RESTART: Duration = Duration::from_secs(1);

/// The simulated node.
pub struct Node {
    plan: Plan,
    trace: Trace,
    network: Arc<dyn NetworkStack>,
    drives: Vec<(Uuid, Arc<MemStore>)>,
    osd: RoleSlot,
    store: RoleSlot,
}

/// A role of the node, which the simulator starts again when it has ended.
#[derive(Default)]
struct RoleSlot {
    role: RefCell<Option<Role>>,
    /// Number of faults that keep the role down.
    held: std::cell::Cell<u32>,
    /// Signals that `held` has changed.
    changed: tokio::sync::Notify,
}

impl Node {
    /// Creates a node with new drives. No role runs yet.
    #[must_use]
    pub fn new(plan: &Plan, trace: &Trace, network: Arc<dyn NetworkStack>) -> Rc<Node> {
        let drives = (0..plan.targets).map(|_| (base::entropy::uuid(), Arc::new(MemStore::new()))).collect();
        Rc::new(Node {
            plan: plan.clone(),
            trace: trace.clone(),
            network,
            drives,
            osd: RoleSlot::default(),
            store: RoleSlot::default(),
        })
    }

    /// Starts the node's roles, and starts them again whenever they end.
    pub fn run(self: &Rc<Node>) {
        for role in self.roles() {
            let node = Rc::clone(self);
            base::task::spawn_local(
                base::thread::ThreadClass::Admin,
                async move { node.supervise(role).await },
            );
        }
    }

    /// The roles of the node.
    pub fn roles(&self) -> impl Iterator<Item = NodeRole> + use<> {
        let is_dpu = self.plan.placement == Placement::Dpu && false;
        is_dpu.then_some(NodeRole::Store).into_iter().chain([NodeRole::Osd])
    }

    fn slot(&self, role: NodeRole) -> &RoleSlot {
        match role {
            NodeRole::Osd => &self.osd,
            NodeRole::Store => &self.store,
        }
    }

    async fn supervise(self: Rc<Node>, kind: NodeRole) {
        let slot = self.slot(kind);
        loop {
            while slot.held.get() > 0 {
                slot.changed.notified().await;
            }
            self.trace.event(format_args!("start {kind}"));
            let role = match kind {
                NodeRole::Osd => Role::start(Rc::clone(&self).osd_body()),
                NodeRole::Store => Role::start(std::future::pending()),
            };
            *slot.role.borrow_mut() = Some(role.clone());
            role.ended().await;
            if slot.held.get() == 0 {
                self.trace.event(format_args!("{kind} has ended by itself"));
                tokio::time::sleep(RESTART).await;
            }
        }
    }

    /// Kills a role. The role starts again after [`release`](Self::release).
    pub fn kill(&self, kind: NodeRole) {
        let slot = self.slot(kind);
        slot.held.set(slot.held.get() + 1);
        if let Some(role) = slot.role.borrow_mut().take() {
            role.kill();
        }
    }

    /// Ends one [`kill`](Self::kill).
    pub fn release(&self, kind: NodeRole) {
        let slot = self.slot(kind);
        slot.held.set(slot.held.get() - 1);
        slot.changed.notify_one();
    }

    /// The role that runs now, if it runs.
    pub fn role(&self, kind: NodeRole) -> Option<Role> {
        self.slot(kind).role.borrow().clone()
    }

    async fn osd_body(self: Rc<Node>) {
        let engines = Engines::start(EngineOptions { threads: 0, ..EngineOptions::default() }, None);
        let engines = Arc::new(engines.expect("engines without threads always start"));
        let config = OsdConfig {
            placement: Placement::Host,
            coding: CodingConfig {
                threads: 0,
                stripes: StripesAt::Here(Some(engines)),
                ..CodingConfig::default()
            },
            ..OsdConfig::default()
        };
        let targets: Vec<(Uuid, Arc<dyn ObjectStore>)> =
            self.drives.iter().map(|(uuid, store)| (*uuid, Arc::clone(store) as _)).collect();
        let arena = Arena::anonymous(STAGING).expect("the machine has memory for a simulation");
        let staging = BufferPool::new(arena, 0, LARGEST_BUFFER);
        let ready = |started: Result<String, osd::StartError>| match started {
            Ok(endpoint) => self.trace.event(format_args!("the osd serves {endpoint}")),
            Err(e) => self.trace.event(format_args!("the osd cannot start: {e}")),
        };
        let network = Arc::clone(&self.network);
        OsdServer::serve(config, targets, staging, network, ENDPOINT, ready, std::future::pending()).await;
    }
}
