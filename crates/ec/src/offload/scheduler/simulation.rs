//! Simulates coding places under load without using real time. `tests` compares `hybrid:auto` with
//! every fixed ratio.

mod tests;

use std::cmp::Reverse;
use std::collections::{BinaryHeap, VecDeque};
use std::time::Duration;

use base::clock::Instant;
use rand::rngs::SmallRng;
use rand::{Rng, SeedableRng};
use wire::CodingMode;

use super::admission::{TaskAdmission, TaskInService, TaskOutcome};
use super::{Capacity, CodingPlace, Reason, SchedulerConfig};

const US: u64 = 1000;
const MS: u64 = 1000 * US;
const S: u64 = 1000 * MS;

/// Cost of a task at a coding place: fixed nanoseconds, and nanoseconds per kilobyte.
#[derive(Debug, Clone, Copy)]
struct Cost {
    task_ns: u64,
    kb_ns: u64,
}

/// How a coding place executes tasks.
#[derive(Debug, Clone, Copy)]
enum Server {
    /// This number of lanes. Each lane executes one task at a time.
    Lanes(usize),
    /// All waiting tasks, up to this number of bytes, form one batch. `task_ns` is the cost per
    /// batch.
    Batches(u64),
}

#[derive(Debug, Clone, Copy)]
struct Site {
    server: Server,
    slots: usize,
    cost: Cost,
}

/// Times at which tasks arrive.
#[derive(Debug, Clone, Copy)]
enum Load {
    /// A fixed number of callers. Each caller has one task at a time, and pauses between two tasks.
    Closed { callers: usize, pause_ns: u64 },
    /// A burst of tasks at fixed intervals, independent of earlier tasks.
    Open { burst: usize, every_ns: u64 },
    /// Like `Closed` without pauses, but in every other period of `every_ns`, only the first `few`
    /// callers send tasks.
    Swinging { callers: usize, few: usize, every_ns: u64 },
}

#[derive(Debug, Clone)]
struct Pattern {
    name: &'static str,
    host: Site,
    offload: Site,
    load: Load,
    /// Sizes of the tasks, chosen at random.
    sizes: &'static [u64],
    /// Time at which the costs of the places change, and the new costs.
    change: Option<(u64, Cost, Cost)>,
    /// Start of the measured time, in nanoseconds.
    from: u64,
    /// End of the measured time, in nanoseconds.
    until: u64,
}

#[derive(Debug, Default, Clone, Copy)]
struct Tally {
    bytes: u64,
    /// Number of tasks sent to the DPU.
    offloaded: u64,
    explored: u64,
    tasks: u64,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Event {
    Arrive {
        caller: usize,
    },
    Burst,
    /// A lane or a batch of the place with this index is done.
    Served(usize),
    Change,
}

/// A task at a place: its size in bytes, and its caller.
type Task = (TaskInService, u64, usize);

/// A coding place with its tasks.
struct Running {
    site: Site,
    waiting: VecDeque<Task>,
    /// Tasks that are being executed, with the time of their end. The tasks of a batch end
    /// together.
    serving: Vec<(u64, Vec<Task>)>,
}

struct Simulation<'a> {
    pattern: &'a Pattern,
    start: Instant,
    now: u64,
    order: u64,
    events: BinaryHeap<Reverse<(u64, u64, Event)>>,
    admission: TaskAdmission<(u64, usize)>,
    places: [Running; 2],
    dice: SmallRng,
    result: Tally,
}

/// Caller number of tasks in an open load, which have no waiting caller.
const NOBODY: usize = usize::MAX;

impl Running {
    fn of(site: Site) -> Running {
        Running { site, waiting: VecDeque::new(), serving: Vec::new() }
    }

    /// Starts waiting tasks. Returns their end times.
    fn take_up(&mut self, now: u64) -> Vec<u64> {
        let mut ends = Vec::new();
        let cost = self.site.cost;
        match self.site.server {
            Server::Lanes(lanes) => {
                while self.serving.len() < lanes
                    && let Some(task) = self.waiting.pop_front()
                {
                    let end = now + cost.task_ns + cost.kb_ns * task.1 / 1000;
                    self.serving.push((end, vec![task]));
                    ends.push(end);
                }
            }
            Server::Batches(limit) if self.serving.is_empty() && !self.waiting.is_empty() => {
                let (mut batch, mut bytes) = (Vec::new(), 0);
                while let Some(task) = self.waiting.front()
                    && (bytes == 0 || bytes + task.1 <= limit)
                {
                    bytes += task.1;
                    batch.extend(self.waiting.pop_front());
                }
                let end = now + cost.task_ns + cost.kb_ns * bytes / 1000;
                self.serving.push((end, batch));
                ends.push(end);
            }
            Server::Batches(_) => {}
        }
        ends
    }
}

impl Simulation<'_> {
    fn run(pattern: &Pattern, mode: CodingMode) -> Tally {
        let capacity = |site: Site| {
            let lanes = if let Server::Lanes(lanes) = site.server { lanes } else { 1 };
            // Give a fixed ratio many slots: with few slots, a task that waits for a full place
            // would block the queue. So `auto` is compared with the best result of each ratio.
            let slots = if mode == CodingMode::Auto { site.slots } else { site.slots.max(64) };
            Capacity { slots, lanes }
        };
        let (host, offload) = (capacity(pattern.host), capacity(pattern.offload));
        let config = SchedulerConfig {
            mode,
            queue: 256,
            host,
            offload,
            cool_down: Duration::from_secs(1),
            ..SchedulerConfig::default()
        };
        let mut simulation = Simulation {
            pattern,
            start: Instant::now(),
            now: 0,
            order: 0,
            events: BinaryHeap::new(),
            admission: TaskAdmission::new(config),
            places: [Running::of(pattern.host), Running::of(pattern.offload)],
            dice: SmallRng::seed_from_u64(7),
            result: Tally::default(),
        };
        simulation.begin();
        while let Some(Reverse((at, _, event))) = simulation.events.pop() {
            if at >= pattern.until {
                break;
            }
            simulation.now = at;
            simulation.handle(event);
            simulation.dispatch();
        }
        simulation.result
    }

    fn at(&mut self, time: u64, event: Event) {
        self.order += 1;
        self.events.push(Reverse((time, self.order, event)));
    }

    fn begin(&mut self) {
        match self.pattern.load {
            Load::Closed { callers, .. } | Load::Swinging { callers, .. } => {
                (0..callers).for_each(|caller| self.at(caller as u64 * US, Event::Arrive { caller }));
            }
            Load::Open { .. } => self.at(0, Event::Burst),
        }
        if let Some((at, ..)) = self.pattern.change {
            self.at(at, Event::Change);
        }
    }

    fn handle(&mut self, event: Event) {
        match event {
            Event::Arrive { caller } => self.arrive(caller),
            Event::Burst => {
                let Load::Open { burst, every_ns } = self.pattern.load else { return };
                (0..burst).for_each(|_| self.arrive(NOBODY));
                self.at(self.now + every_ns, Event::Burst);
            }
            Event::Served(place) => self.served(place),
            Event::Change => {
                let Some((_, host, offload)) = self.pattern.change else { return };
                (self.places[0].site.cost, self.places[1].site.cost) = (host, offload);
            }
        }
    }

    fn arrive(&mut self, caller: usize) {
        if let Load::Swinging { few, every_ns, .. } = self.pattern.load {
            let swing = self.now / every_ns;
            if caller >= few && swing % 2 == 1 {
                return self.at((swing + 1) * every_ns, Event::Arrive { caller });
            }
        }
        let bytes = self.pattern.sizes[self.dice.random_range(0..self.pattern.sizes.len())];
        // With an open load, tasks that arrive while the queue is full are lost.
        let _ = self.admission.push(bytes, (bytes, caller));
    }

    fn served(&mut self, place: usize) {
        let now = self.now;
        let due = |(end, _): &(u64, _)| *end <= now;
        let ended: Vec<_> = self.places[place].serving.extract_if(.., |serving| due(serving)).collect();
        for (ticket, bytes, caller) in ended.into_iter().flat_map(|(_, tasks)| tasks) {
            self.admission.end(ticket, TaskOutcome::Done, self.start + Duration::from_nanos(now));
            if (self.pattern.from..self.pattern.until).contains(&now) {
                self.result.bytes += bytes;
            }
            if caller != NOBODY {
                let pause = if let Load::Closed { pause_ns, .. } = self.pattern.load { pause_ns } else { 0 };
                // A caller needs a little time between two tasks.
                self.at(now + 2 * US + pause, Event::Arrive { caller });
            }
        }
    }

    fn dispatch(&mut self) {
        while let Some(((bytes, caller), ticket, reason)) =
            self.admission.next(self.start + Duration::from_nanos(self.now))
        {
            self.result.tasks += 1;
            self.result.offloaded += u64::from(ticket.place == CodingPlace::Offload);
            self.result.explored += u64::from(reason == Reason::Explore);
            self.places[ticket.place as usize].waiting.push_back((ticket, bytes, caller));
        }
        for place in 0..2 {
            for end in self.places[place].take_up(self.now) {
                self.at(end, Event::Served(place));
            }
        }
    }
}
