//! Tests with simulated hosts that have four CPUs and are sampled every 100 ms.

use super::*;

const STEP: Duration = Duration::from_millis(100);
const CPUS: u32 = 4;

/// Use of the CPUs during a step, as shares of their time.
#[derive(Debug, Clone, Copy, Default)]
struct Use {
    /// All uses except the following ones.
    others: f64,
    dpu: f64,
    coding: f64,
    store: f64,
    pressure: f64,
}

struct Host {
    load: HostLoad,
    now: Instant,
    reading: LoadCounters,
}

impl Host {
    fn new() -> Host {
        let mut host = Host {
            load: HostLoad::new(Thresholds::default()),
            now: Instant::now(),
            // The counters start at the boot of the machine, so they are not 0.
            reading: LoadCounters { all: 1000 * STEP, busy: 900 * STEP, ..LoadCounters::default() },
        };
        host.reading.pressure = Some(700 * STEP);
        host.load.sample(host.now, host.reading);
        host
    }

    fn without_pressure() -> Host {
        let mut host = Host::new();
        host.reading.pressure = None;
        host
    }

    fn step(&mut self, used: Use) -> LoadLevel {
        let time = |part: f64| (CPUS * STEP).mul_f64(part);
        self.now += STEP;
        self.reading.all += CPUS * STEP;
        self.reading.busy += time(used.others + used.dpu + used.coding + used.store);
        self.reading.dpu += time(used.dpu);
        self.reading.coding += time(used.coding);
        self.reading.store += time(used.store);
        self.reading.pressure = self.reading.pressure.map(|waited| waited + STEP.mul_f64(used.pressure));
        self.load.sample(self.now, self.reading)
    }

    fn steps(&mut self, count: usize, used: Use) -> Vec<LoadLevel> {
        (0..count).map(|_| self.step(used)).collect()
    }
}

fn others(part: f64) -> Use {
    Use { others: part, ..Use::default() }
}

#[test]
fn a_host_becomes_busy_at_once_and_calm_only_after_half_a_second() {
    let mut host = Host::new();
    assert_eq!(host.steps(3, others(0.85)), [LoadLevel::Calm; 3]);
    assert_eq!(host.step(others(0.95)), LoadLevel::Busy);
    assert!((host.load.utilization() - 0.95).abs() < 1e-6);
    assert_eq!(
        host.steps(20, others(0.8)),
        [LoadLevel::Busy; 20],
        "between the thresholds, the host stays busy"
    );
    assert_eq!(host.steps(4, others(0.5)), [LoadLevel::Busy; 4]);
    assert_eq!(host.step(others(0.8)), LoadLevel::Busy, "the calm period must start again");
    assert_eq!(host.steps(4, others(0.5)), [LoadLevel::Busy; 4]);
    assert_eq!(host.step(others(0.5)), LoadLevel::Calm);
    assert_eq!(host.steps(3, others(0.85)), [LoadLevel::Calm; 3]);
}

#[test]
fn coding_on_the_host_does_not_make_the_host_busy() {
    let mut host = Host::new();
    let coding = Use { others: 0.2, coding: 0.8, pressure: 0.9, ..Use::default() };
    assert_eq!(
        host.steps(5, coding),
        [LoadLevel::Calm; 5],
        "while other work is below the floor of utilization, pressure does not count"
    );
    let crowded = Use { others: 0.5, coding: 0.5, pressure: 0.9, ..Use::default() };
    assert_eq!(host.step(crowded), LoadLevel::Busy, "above the floor of utilization, pressure counts");
}

#[test]
fn threads_that_emulate_the_dpu_do_not_count_as_load_of_the_host() {
    let mut host = Host::new();
    let emulating = Use { others: 0.25, dpu: 0.5, pressure: 0.5, ..Use::default() };
    host.step(emulating);
    assert!((host.load.utilization() - 0.5).abs() < 1e-6, "half of the remaining time is busy");
    let mut host = Host::new();
    assert_eq!(host.step(Use { others: 0.1, dpu: 0.7, pressure: 0.9, ..Use::default() }), LoadLevel::Calm);
    assert_eq!(host.step(Use { others: 0.28, dpu: 0.7, ..Use::default() }), LoadLevel::Busy);
    assert_eq!(Host::new().step(Use { dpu: 1.0, pressure: 1.0, ..Use::default() }), LoadLevel::Calm);
}

#[test]
fn pressure_counts_only_while_utilization_is_above_the_floor() {
    let waiting = |others, pressure| Use { others, pressure, ..Use::default() };
    assert_eq!(Host::new().step(waiting(0.3, 0.9)), LoadLevel::Calm);
    assert_eq!(Host::new().step(waiting(0.5, 0.3)), LoadLevel::Calm);
    let mut host = Host::new();
    assert_eq!(host.step(waiting(0.5, 0.5)), LoadLevel::Busy);
    assert_eq!(host.load.pressure().map(|part| (part * 10.0).round()), Some(5.0));
    assert_eq!(host.steps(9, waiting(0.5, 0.3)), [LoadLevel::Busy; 9]);
    assert_eq!(
        host.steps(5, waiting(0.3, 0.9))[4],
        LoadLevel::Calm,
        "below the floor of utilization, pressure does not count"
    );
}

#[test]
fn utilization_alone_decides_whether_the_host_is_busy_if_pressure_is_unknown() {
    let mut host = Host::without_pressure();
    assert_eq!(host.step(others(0.85)), LoadLevel::Calm);
    assert_eq!((host.step(others(0.95)), host.load.pressure()), (LoadLevel::Busy, None));
}

#[test]
fn the_work_of_the_store_can_be_left_out() {
    let used = Use { store: 0.95, ..Use::default() };
    assert_eq!(Host::without_pressure().step(used), LoadLevel::Busy);
    let mut host = Host::without_pressure();
    host.load = HostLoad::new(Thresholds { counts_store: false, ..Thresholds::default() });
    host.step(used);
    assert_eq!(host.step(used), LoadLevel::Calm);
    assert!(host.load.utilization() < 0.01, "{}", host.load.utilization());
    assert_eq!(host.step(Use { store: 0.05, ..others(0.92) }), LoadLevel::Busy, "other work still counts");
}

#[test]
fn an_old_reading_is_unknown_and_does_not_keep_the_host_busy() {
    let mut host = Host::without_pressure();
    assert_eq!(host.step(others(1.0)), LoadLevel::Busy);
    assert!(host.load.is_current(host.now));
    // The host was busy the whole time, but no sample was taken.
    host.now += CURRENT;
    host.reading.all += CPUS * CURRENT;
    host.reading.busy += CPUS * CURRENT;
    assert!(!host.load.is_current(host.now + STEP));
    assert_eq!(host.step(others(1.0)), LoadLevel::Calm, "the first sample after a pause is only a start");
    assert_eq!(host.step(others(1.0)), LoadLevel::Busy);
    host.load.forget();
    assert!(!host.load.is_current(host.now));
}

#[test]
fn impossible_counters_do_not_make_the_host_busy() {
    let mut host = Host::new();
    let (all, busy) = (host.reading.all, host.reading.busy);
    // The excluded time is larger than the total.
    let used = LoadCounters {
        all: all + 4 * STEP,
        busy: busy + STEP,
        dpu: 9 * STEP,
        coding: 9 * STEP,
        store: 9 * STEP,
        pressure: None,
    };
    assert_eq!(host.load.sample(host.now + STEP, used), LoadLevel::Calm);
    assert!((0.0..=1.0).contains(&host.load.utilization()));
    // The counters have decreased.
    assert_eq!(host.load.sample(host.now + 2 * STEP, LoadCounters::default()), LoadLevel::Calm);
    // The interval is too short.
    let all_busy = LoadCounters { all: 4 * STEP, busy: 4 * STEP, ..LoadCounters::default() };
    assert_eq!(host.load.sample(host.now + 2 * STEP + LEAST_INTERVAL / 2, all_busy), LoadLevel::Calm);
    assert_eq!(host.load.sample(host.now + 3 * STEP, all_busy), LoadLevel::Busy);
}
