//! Tests of the ring with a driver: recovery after a stop at each change of shared memory, and
//! defective drivers.

use std::collections::BTreeMap;
use std::panic::{AssertUnwindSafe, catch_unwind};

use proptest::prelude::*;
use vm_memory::Bytes;

use super::*;
use crate::inflight::{InflightFile, RecordLayout, create};
use crate::memory::MemoryRange;
use crate::stop_point::{Stopped, stop_at};

#[path = "../../tests/e2e/guest.rs"]
mod guest;

use guest::{GuestQueue, RAM_START, memory_file};

const SIZE: u16 = 8;
const DATA: u64 = RAM_START + 0x2_0000;
/// Bytes of a request that name it: the device reads them.
const NAME_LEN: u32 = 8;

/// A driver, and what survives a kill of the device.
struct Machine {
    guest: GuestQueue,
    ram: Arc<GuestRam>,
    records: InflightFile,
    event_index: bool,
}

impl Machine {
    fn new(event_index: bool) -> Machine {
        let (range, file) = memory_file(RAM_START, 1 << 20);
        let ram = Arc::new(GuestRam::map(&[(range, file)]).unwrap());
        let layout = RecordLayout::new(1, SIZE);
        let records = InflightFile::map(create(layout).unwrap(), layout).unwrap();
        let guest = GuestQueue::new(Arc::clone(&ram), 0, SIZE, event_index);
        Machine { guest, ram, records, event_index }
    }

    fn place(&self) -> RingPlace {
        RingPlace {
            size: SIZE,
            descriptors: GuestAddress(self.guest.start),
            available: GuestAddress(self.guest.available_ring()),
            used: GuestAddress(self.guest.used_ring()),
            event_index: self.event_index,
            indirect: true,
        }
    }

    /// Starts the device's side, for the first time or after a kill.
    fn start(&self) -> Result<SplitRing, RingError> {
        let record = self.records.record(0, SIZE).unwrap();
        SplitRing::start(self.place(), Arc::clone(&self.ram), record, 0)
    }

    /// Makes a request available, which has this name.
    fn submit(&mut self, name: u64) -> u16 {
        let at = DATA + name % 64 * 16;
        self.ram.write_obj(name, GuestAddress(at)).unwrap();
        self.guest.put(&[(at, NAME_LEN, false), (at + 8, 1, true)])
    }
}

fn name_of(request: &TakenRequest) -> u64 {
    use disk::Memory;
    let mut name = [0; 8];
    request.chain.readable.copy_out(0, &mut name).unwrap();
    u64::from_le_bytes(name)
}

/// One step of the driver or the device. A device step does nothing if there is nothing to do.
#[derive(Debug, Clone)]
enum ModelStep {
    Submit,
    Take,
    /// Completes one of the taken requests.
    Complete(prop::sample::Index),
}

fn steps() -> impl Strategy<Value = Vec<ModelStep>> {
    let step = prop_oneof![
        Just(ModelStep::Submit),
        Just(ModelStep::Take),
        any::<prop::sample::Index>().prop_map(ModelStep::Complete),
    ];
    prop::collection::vec(step, 1..40)
}

/// Executes steps. The device is stopped at each of the points in turn, and restarted. Returns whether
/// all stops took place.
fn run(steps: &[ModelStep], stops: &[u32], event_index: bool) -> bool {
    let mut machine = Machine::new(event_index);
    let (mut submitted, mut completed) = (BTreeMap::new(), Vec::new());
    let mut next_name = 1u64;
    let mut stops_left = stops.iter().copied();
    let mut all_stopped = true;
    let mut position = 0;
    let mut taken: Vec<(u16, u64)> = Vec::new();
    stop_at(stops_left.next());
    // After the steps, the device takes and completes all requests.
    let mut is_ending = false;
    'restart: loop {
        taken.clear();
        let mut ring = match catch_unwind(AssertUnwindSafe(|| machine.start())) {
            Ok(ring) => ring.unwrap(),
            Err(stop) => {
                assert!(stop.is::<Stopped>(), "only a stop ends the device");
                stop_at(stops_left.next());
                continue 'restart;
            }
        };
        loop {
            let step = match steps.get(position) {
                Some(step) => step.clone(),
                None if taken.is_empty() || !is_ending => ModelStep::Take,
                None => ModelStep::Complete(any_index()),
            };
            let outcome = match step {
                ModelStep::Submit => {
                    if machine.guest.free() >= 2 {
                        let head = machine.submit(next_name);
                        submitted.insert(head, next_name);
                        next_name += 1;
                        machine.guest.publish();
                    }
                    Ok(true)
                }
                ModelStep::Take => catch_unwind(AssertUnwindSafe(|| {
                    let request = ring.take().unwrap();
                    if let Some(request) = &request {
                        taken.push((request.head, name_of(request)));
                    }
                    request.is_some()
                })),
                ModelStep::Complete(index) if !taken.is_empty() => {
                    let (head, name) = taken.swap_remove(index.index(taken.len()));
                    assert_eq!(submitted.get(&head), Some(&name), "the request is the one of the driver");
                    catch_unwind(AssertUnwindSafe(|| ring.complete(head, 1).unwrap())).map(|()| true)
                }
                ModelStep::Complete(_) => Ok(false),
            };
            while let Some((head, _)) = machine.guest.completed() {
                completed.push(submitted.remove(&head).expect("a request completes once"));
            }
            position += 1;
            match outcome {
                Err(stop) => {
                    assert!(stop.is::<Stopped>(), "only a stop ends the device");
                    // A kill between the two writes of a completion leaves an entry that the index
                    // does not cover yet.
                    let index: u16 =
                        machine.ram.read_obj(GuestAddress(machine.guest.used_ring() + 2)).unwrap();
                    let at = machine.guest.used_ring() + 4 + 8 * u64::from(index % SIZE);
                    machine.guest.store(at, [0xee; 8]);
                    stop_at(stops_left.next());
                    continue 'restart;
                }
                Ok(did_work) if position > steps.len() => {
                    is_ending = true;
                    if !did_work && taken.is_empty() {
                        break;
                    }
                }
                Ok(_) => {}
            }
        }
        break;
    }
    if stops_left.next().is_some() {
        all_stopped = false;
    }
    // The last stop may be still to come.
    let is_armed = catch_unwind(|| (0..10_000).for_each(|_| stop_point())).is_err();
    stop_at(None);
    assert!(submitted.is_empty(), "requests are lost: {submitted:?}");
    completed.sort_unstable();
    assert_eq!(completed, (1..next_name).collect::<Vec<_>>());
    all_stopped && !is_armed
}

fn any_index() -> prop::sample::Index {
    use proptest::strategy::ValueTree;
    let mut runner = proptest::test_runner::TestRunner::deterministic();
    any::<prop::sample::Index>().new_tree(&mut runner).unwrap().current()
}

#[test]
fn each_request_completes_exactly_once_after_a_stop_at_any_point() {
    let index = any_index();
    let [submit, take, complete] = [ModelStep::Submit, ModelStep::Take, ModelStep::Complete(index)];
    let round =
        [&submit, &submit, &submit, &take, &take, &complete, &take, &submit, &complete, &take, &complete];
    let steps: Vec<ModelStep> = round.into_iter().cycle().take(44).cloned().collect();
    for event_index in [false, true] {
        let mut first = 0;
        while run(&steps, &[first], event_index) {
            // A second stop soon after the first one interrupts the recovery.
            for second in 0..4 {
                run(&steps, &[first, second], event_index);
            }
            first += 1;
        }
        assert!(first > 50, "the steps have {first} points to stop at");
    }
}

proptest! {
    #[test]
    fn random_interleavings_with_stops_complete_each_request_once(
        steps in steps(),
        stops in prop::collection::vec(0u32..40, 0..5),
        event_index: bool,
    ) {
        run(&steps, &stops, event_index);
    }
}

#[test]
fn requests_in_flight_are_resubmitted_in_their_order_before_new_ones() {
    let mut machine = Machine::new(true);
    let mut ring = machine.start().unwrap();
    let heads: Vec<u16> = (1..=3).map(|name| machine.submit(name)).collect();
    machine.guest.publish();
    for head in &heads {
        assert_eq!(ring.take().unwrap().unwrap().head, *head);
    }
    ring.complete(heads[1], 0).unwrap();
    drop(ring);
    machine.submit(4);
    machine.guest.publish();
    let mut ring = machine.start().unwrap();
    assert_eq!(ring.in_flight(), 2);
    assert_eq!(ring.next_available(), 1);
    assert!(ring.needs_signal().unwrap(), "the driver may have missed a completion");
    let names: Vec<u64> = std::iter::from_fn(|| ring.take().unwrap()).map(|taken| name_of(&taken)).collect();
    assert_eq!(names, [1, 3, 4]);
    assert_eq!((ring.in_flight(), ring.next_available()), (3, 4));
}

#[test]
fn a_closed_ring_takes_only_requests_of_an_earlier_ring() {
    let mut machine = Machine::new(false);
    let mut ring = machine.start().unwrap();
    machine.submit(1);
    machine.submit(2);
    machine.guest.publish();
    ring.take().unwrap().unwrap();
    let mut ring = machine.start().unwrap();
    ring.close();
    let head = ring.take().unwrap().unwrap().head;
    assert!(ring.take().unwrap().is_none());
    ring.complete(head, 0).unwrap();
    assert_eq!(ring.next_available(), 1);
}

#[test]
fn invalid_chains_are_refused() {
    use guest::{INDIRECT, NEXT, WRITE};
    let refused = |prepare: &dyn Fn(&GuestQueue)| {
        let mut machine = Machine::new(false);
        let mut ring = machine.start().unwrap();
        prepare(&machine.guest);
        machine.guest.offer_head(0);
        machine.guest.publish();
        match ring.take().unwrap_err() {
            RingError::Chain { head: 0, source } => source,
            e => panic!("{e}"),
        }
    };
    let table = DATA + 0x1000;
    let loops = |guest: &GuestQueue| {
        guest.describe(guest.start, 0, DATA, 1, NEXT, 1);
        guest.describe(guest.start, 1, DATA, 1, NEXT, 0);
    };
    assert_eq!(refused(&loops), ChainError::TooLong);
    let outside = |guest: &GuestQueue| guest.describe(guest.start, 0, 0xffff_ffff_ffff_fff0, 64, 0, 0);
    assert_eq!(refused(&outside), ChainError::NotMemory { address: 0xffff_ffff_ffff_fff0, len: 64 });
    assert_eq!(refused(&|guest| guest.describe(guest.start, 0, DATA, 0, 0, 0)), ChainError::Empty);
    assert_eq!(
        refused(&|guest| guest.describe(guest.start, 0, DATA, 1, NEXT, SIZE)),
        ChainError::Index(SIZE)
    );
    let order = |guest: &GuestQueue| {
        guest.describe(guest.start, 0, DATA, 1, NEXT | WRITE, 1);
        guest.describe(guest.start, 1, DATA, 1, 0, 0);
    };
    assert_eq!(refused(&order), ChainError::Order);
    let nested = |guest: &GuestQueue| {
        guest.describe(guest.start, 0, table, 16, INDIRECT, 0);
        guest.describe(table, 0, table, 16, INDIRECT, 0);
    };
    assert_eq!(refused(&nested), ChainError::Indirect(16));
    for len in [0, 15, 17, 65536 * 16, u32::MAX] {
        let odd = |guest: &GuestQueue| guest.describe(guest.start, 0, table, len, INDIRECT, 0);
        assert_eq!(refused(&odd), ChainError::Indirect(len));
    }
    let continued = |guest: &GuestQueue| guest.describe(guest.start, 0, table, 16, INDIRECT | NEXT, 1);
    assert_eq!(refused(&continued), ChainError::Indirect(16));
    let long = |guest: &GuestQueue| {
        guest.describe(guest.start, 0, table, 2000 * 16, INDIRECT, 0);
        (0..2000).for_each(|at| guest.describe(table, at, DATA, 1, NEXT, at + 1));
    };
    assert_eq!(refused(&long), ChainError::TooLong);
}

#[test]
fn an_invalid_available_ring_is_refused() {
    let machine = Machine::new(false);
    let mut ring = machine.start().unwrap();
    machine.guest.publish_index(SIZE + 1);
    assert!(matches!(ring.take(), Err(RingError::Queue(_))));

    let mut machine = Machine::new(false);
    let mut ring = machine.start().unwrap();
    machine.guest.offer_head(SIZE);
    machine.guest.publish();
    assert!(matches!(ring.take(), Err(RingError::Chain { head: SIZE, source: ChainError::Index(SIZE) })));

    let mut machine = Machine::new(false);
    let mut ring = machine.start().unwrap();
    let head = machine.submit(1);
    machine.guest.offer_head(head);
    machine.guest.publish();
    ring.take().unwrap();
    assert!(matches!(ring.take(), Err(RingError::Duplicate(same)) if same == head));
}

#[test]
fn rings_outside_memory_or_with_impossible_sizes_are_refused() {
    let machine = Machine::new(false);
    let valid = machine.place();
    let end = GuestAddress(RAM_START + (1 << 20));
    for place in [
        RingPlace { size: 3, ..valid },
        RingPlace { size: 0, ..valid },
        RingPlace { descriptors: GuestAddress(valid.descriptors.0 + 8), ..valid },
        RingPlace { available: GuestAddress(valid.available.0 + 1), ..valid },
        RingPlace { used: GuestAddress(valid.used.0 + 2), ..valid },
        RingPlace { descriptors: end, ..valid },
        RingPlace { available: GuestAddress(end.0 - 4), ..valid },
        RingPlace { used: GuestAddress(end.0 - 4), ..valid },
    ] {
        let record = machine.records.record(0, SIZE).unwrap();
        let started = SplitRing::start(place, Arc::clone(&machine.ram), record, 0);
        assert!(matches!(started, Err(RingError::Addresses(_))), "{place:?}");
    }
}
