//! An osd's role and a store's role on one thread, in simulated time.

use std::cell::{Cell, RefCell};
use std::future::poll_fn;
use std::pin::{Pin, pin};
use std::rc::Rc;
use std::sync::{Arc, Once};
use std::task::{Context, Poll};
use std::time::Duration;

use base::clock::Instant;
use base::entropy::{random, seed_this_thread};
use base::fault::{Action, Fault, Faults, Site};
use base::task::in_role;
use channel::sim::{ControlWire, EngineFaults, SimEngine, SimEngineOptions, SimEngineStats, WireOptions};
use channel::{MemoryLayout, MemoryOptions};
use outboard_proxy::{
    Attachment, AttachmentOptions, DmaTuning, LocalServer, ServedTarget, ServerOptions, StoreEndpoint,
    StoreListener,
};
use store::stripes::Engines;
use store::{MemStore, ObjectStore, StoreFuture, StoreRequest, Submit};
use tokio::task::LocalSet;
use uuid::Uuid;

/// Number of targets of the store.
pub const TARGETS: usize = 2;

/// A store whose answers take a random time. If it reads late, it also reads the payload of a stage
/// write only after a random time, so a caller must await the write before it uses the stage. It has
/// the content of another store, which outlives the store's role as a drive would.
struct SlowStore {
    behind: Arc<MemStore>,
    answer_max: Duration,
    reads_late: bool,
}

impl Submit for SlowStore {
    type Reply = StoreFuture;

    fn submit(&self, request: StoreRequest) -> StoreFuture {
        let late = self.answer_max.mul_f64(random());
        if self.reads_late && matches!(request, StoreRequest::StageWrite { .. }) {
            let behind = Arc::clone(&self.behind);
            return Box::pin(async move {
                tokio::time::sleep(late).await;
                behind.submit(request).await
            });
        }
        let reply = self.behind.submit(request);
        Box::pin(async move {
            tokio::time::sleep(late).await;
            reply.await
        })
    }
}

/// The tasks of a role. They run only while the role is alive and not paused.
#[derive(Default)]
pub struct Role {
    tasks: RefCell<Option<LocalSet>>,
    paused_until: Cell<Option<Instant>>,
}

impl Role {
    pub fn start(&self, task: impl Future<Output = ()> + 'static) {
        let tasks = LocalSet::new();
        tasks.spawn_local(task);
        let before = self.tasks.replace(Some(tasks));
        assert!(before.is_none(), "the role was already running");
    }

    pub fn is_running(&self) -> bool {
        self.tasks.borrow().is_some()
    }

    pub fn pause(&self, length: Duration) {
        self.paused_until.set(Some(Instant::now() + length));
    }

    fn kill(&self) {
        self.paused_until.set(None);
        let tasks = self.tasks.take();
        in_role(|| drop(tasks));
    }

    fn poll(&self, cx: &mut Context<'_>) {
        let is_paused = self.paused_until.get().is_some_and(|until| Instant::now() < until);
        let Some(tasks) = self.tasks.take_if(|_| !is_paused) else { return };
        // A set without tasks would be complete as a future, although it may get tasks later.
        in_role(|| assert!(pin!(tasks.run_until(std::future::pending::<()>())).poll(cx).is_pending()));
        self.tasks.replace(Some(tasks));
    }
}

trait TakeIf<T> {
    fn take_if(&self, condition: impl FnOnce(&T) -> bool) -> Option<T>;
}

impl<T> TakeIf<T> for RefCell<Option<T>> {
    fn take_if(&self, condition: impl FnOnce(&T) -> bool) -> Option<T> {
        let mut value = self.borrow_mut();
        if value.as_ref().is_some_and(condition) { value.take() } else { None }
    }
}

/// Settings of a simulation.
#[derive(Debug, Clone)]
pub struct Settings {
    /// When a transfer is overdue.
    pub overdue: Duration,
    /// How long DMA is not used after a failure.
    pub cool_down: Duration,
    pub faults: EngineFaults,
    /// Maximum time of the store's answers.
    pub answer_max: Duration,
    /// Whether the store reads the payload of a stage write only after a random time.
    pub reads_late: bool,
    /// Fixed time of a payload chain.
    pub setup_cost: Duration,
    pub socket_only: bool,
    /// How long the osd's side polls.
    pub poll: Duration,
    /// Probability that the store does not ring the osd's doorbell.
    pub drop_osd_doorbell: f64,
    /// Probability that a doorbell is late.
    pub late_doorbell: f64,
}

impl Default for Settings {
    fn default() -> Settings {
        Settings {
            overdue: Duration::from_millis(500),
            cool_down: Duration::from_secs(1),
            faults: EngineFaults::default(),
            answer_max: Duration::ZERO,
            reads_late: false,
            setup_cost: Duration::ZERO,
            socket_only: false,
            poll: Duration::ZERO,
            drop_osd_doorbell: 0.0,
            late_doorbell: 0.0,
        }
    }
}

/// An osd, a store, and the parts of a node between and below them.
pub struct World {
    pub settings: Settings,
    pub wire: ControlWire,
    pub osd: Role,
    pub store: Role,
    pub disks: RefCell<Vec<Arc<MemStore>>>,
    engines: RefCell<Vec<Arc<SimEngine>>>,
    devices: RefCell<Vec<Pin<Box<dyn Future<Output = ()>>>>>,
    pub attachment: RefCell<Option<Attachment>>,
    pub server: RefCell<Option<LocalServer>>,
    /// Faults of the store's process.
    pub store_faults: Faults,
    /// Whether the server's future has not completed.
    pub is_serving: Rc<Cell<bool>>,
}

fn empty_disks() -> Vec<Arc<MemStore>> {
    (0..TARGETS).map(|_| Arc::new(MemStore::new())).collect()
}

impl World {
    fn new(settings: Settings) -> World {
        let store_faults = Faults::default();
        if settings.drop_osd_doorbell > 0.0 {
            let (site, action, probability) = (Site::StoreDoorbell, Action::Drop, settings.drop_osd_doorbell);
            store_faults
                .arm(Fault { site, action, after: 0, count: None, probability, seed: random() })
                .unwrap();
        }
        World {
            store_faults,
            is_serving: Rc::default(),
            wire: ControlWire::new(WireOptions {
                seed: random(),
                late_doorbell: settings.late_doorbell,
                late_doorbell_max: Duration::from_secs(4),
                ..WireOptions::default()
            }),
            osd: Role::default(),
            store: Role::default(),
            settings,
            disks: RefCell::new(empty_disks()),
            engines: RefCell::default(),
            devices: RefCell::default(),
            attachment: RefCell::default(),
            server: RefCell::default(),
        }
    }

    fn poll(&self, cx: &mut Context<'_>) {
        self.osd.poll(cx);
        self.store.poll(cx);
        self.devices.borrow_mut().retain_mut(|device| device.as_mut().poll(cx).is_pending());
    }

    pub fn slow_store(&self, target: usize) -> Arc<dyn ObjectStore> {
        let behind = Arc::clone(&self.disks.borrow()[target]);
        let Settings { answer_max, reads_late, .. } = self.settings;
        Arc::new(SlowStore { behind, answer_max, reads_late })
    }

    /// Replaces the drives by empty ones. The store must not be running.
    pub fn replace_disks(&self) {
        self.disks.replace(empty_disks());
    }

    pub fn uuid(target: usize) -> Uuid {
        Uuid::from_u128(1 + target as u128)
    }

    /// Starts the store's process.
    pub fn start_store(&self) {
        let target = |number| ServedTarget { uuid: World::uuid(number), store: self.slow_store(number) };
        let engines = Some(Arc::new(Engines::inline(Faults::default(), false)));
        let faults = self.store_faults.clone();
        let options = ServerOptions { engines, faults, ..ServerOptions::default() };
        let listener = StoreListener::Sim(self.wire.listen());
        let (server, serving) =
            LocalServer::new(listener, (0..TARGETS).map(target).collect(), options).unwrap();
        self.is_serving.set(true);
        let is_serving = Rc::clone(&self.is_serving);
        self.store.start(async move {
            serving.await;
            is_serving.set(false);
        });
        self.server.replace(Some(server));
    }

    pub fn kill_store(&self) {
        self.wire.sever_store();
        self.store.kill();
        self.server.take();
    }

    /// Starts the osd's process. `main` runs when the osd is attached to the store.
    pub fn start_osd<F: Future<Output = ()>>(self: &Rc<Self>, main: impl FnOnce(Attachment) -> F + 'static) {
        let (engine, device) = SimEngine::new(SimEngineOptions {
            seed: random(),
            setup_cost: self.settings.setup_cost,
            faults: self.settings.faults,
            ..SimEngineOptions::default()
        });
        self.engines.borrow_mut().push(Arc::clone(&engine));
        self.devices.borrow_mut().push(Box::pin(device));
        let options = AttachmentOptions {
            memory: MemoryOptions {
                layout: MemoryLayout { ring_len: 64 << 10, data_len: 2 << 20 },
                pool_len: 2 << 20,
                largest_buffer: 1 << 20,
            },
            engine: Some(engine),
            socket_only: self.settings.socket_only,
            overdue: self.settings.overdue,
            cool_down: self.settings.cool_down,
            verify_every: 1,
            tuning: DmaTuning { poll: self.settings.poll, ..DmaTuning::default() },
            ..AttachmentOptions::default()
        };
        let world = Rc::clone(self);
        self.osd.start(async move {
            let attachment = loop {
                let endpoint = StoreEndpoint::Sim(world.wire.clone());
                match Attachment::connect(endpoint, options.clone()).await {
                    Ok(attachment) => break attachment,
                    Err(e) => tracing::info!("not attached: {e}"),
                }
            };
            world.attachment.replace(Some(attachment.clone()));
            main(attachment).await;
        });
    }

    /// Kills the osd. Afterwards, nothing of it is left in memory.
    pub fn kill_osd(&self) {
        let memory = self.attachment.take().map(|attachment| Arc::downgrade(attachment.pool().arena()));
        self.engine().sever();
        self.wire.sever_osd();
        self.osd.kill();
        assert!(memory.is_none_or(|memory| memory.strong_count() == 0), "the osd's memory is leaked");
    }

    /// The engine of the current osd.
    pub fn engine(&self) -> Arc<SimEngine> {
        Arc::clone(self.engines.borrow().last().expect("an osd was started"))
    }

    /// What all engines have done, and a hash of all their operations.
    pub fn engine_stats(&self) -> SimEngineStats {
        let add = |sum: SimEngineStats, engine: &Arc<SimEngine>| {
            let of = engine.stats();
            SimEngineStats {
                trace: sum.trace.rotate_left(1) ^ of.trace,
                operations: sum.operations + of.operations,
                failed: sum.failed + of.failed,
                stalled: sum.stalled + of.stalled,
                moved_late: sum.moved_late + of.moved_late,
                corrupted: sum.corrupted + of.corrupted,
                dropped_doorbells: sum.dropped_doorbells + of.dropped_doorbells,
                device_failures: sum.device_failures + of.device_failures,
                device_hangs: sum.device_hangs + of.device_hangs,
                resets: sum.resets + of.resets,
            }
        };
        self.engines.borrow().iter().fold(SimEngineStats::default(), add)
    }
}

thread_local! {
    static PANICS: Cell<u32> = const { Cell::new(0) };
}

/// Counts the panics of each thread. The runtime catches a panic of a task, which would otherwise go
/// unnoticed.
fn count_panics() {
    static HOOK: Once = Once::new();
    HOOK.call_once(|| {
        let report = std::panic::take_hook();
        std::panic::set_hook(Box::new(move |panic| {
            PANICS.set(PANICS.get() + 1);
            report(panic);
        }));
    });
}

/// Runs a scenario on this thread in simulated time. `seed` determines everything that happens.
pub fn simulate<T>(seed: u64, settings: Settings, scenario: impl AsyncFnOnce(Rc<World>) -> T) -> T {
    count_panics();
    let panics = PANICS.get();
    let _seeded = seed_this_thread(seed);
    let mut runtime = tokio::runtime::Builder::new_current_thread();
    let runtime = runtime.enable_time().start_paused(true).build().unwrap();
    runtime.block_on(async {
        let world = Rc::new(World::new(settings));
        let mut scenario = pin!(scenario(Rc::clone(&world)));
        let result = poll_fn(|cx| {
            if let Poll::Ready(result) = scenario.as_mut().poll(cx) {
                return Poll::Ready(result);
            }
            world.poll(cx);
            assert_eq!(PANICS.get(), panics, "a task has panicked");
            Poll::Pending
        })
        .await;
        world.kill_store();
        if world.osd.is_running() {
            world.kill_osd();
        }
        result
    })
}
