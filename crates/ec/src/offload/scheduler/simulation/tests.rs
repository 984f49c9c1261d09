//! Compares `hybrid:auto` with every fixed ratio.

use wire::{CodingMode, CodingRatio};

use super::*;

/// Returns the fixed ratios from 16:1 to 1:16, and the two ratios that use a single place.
fn ratios() -> impl Iterator<Item = CodingRatio> {
    let ends = [(1, 0), (0, 1)];
    let between = (1..=16).flat_map(|part| [(part, 1), (1, part)]);
    ends.into_iter().chain(between).map(|(alpha, beta)| CodingRatio::new(alpha, beta).unwrap())
}

/// Asserts that `hybrid:auto` reaches at least 97 % of the best fixed ratio's throughput, and
/// explores with at most one task in a hundred.
fn assert_auto_is_near_the_best(pattern: &Pattern) {
    let auto = Simulation::run(pattern, CodingMode::Auto);
    let fixed = ratios().map(|ratio| (ratio, Simulation::run(pattern, CodingMode::Hybrid(ratio))));
    let best = fixed.max_by_key(|(_, result)| result.bytes).unwrap();
    let part = auto.bytes as f64 / best.1.bytes as f64;
    assert!(part >= 0.97, "{}: {part:.4} of the best: {auto:?}, {best:?}, {pattern:?}", pattern.name);
    assert!(auto.explored <= 4 + auto.tasks / 100, "{}: {auto:?}, {pattern:?}", pattern.name);
}

const MB: u64 = 1_000_000;
const LARGE: &[u64] = &[4 * MB];
const MEDIUM: &[u64] = &[MB];
const MIXED: &[u64] = &[4_000, 16_000, 64_000, 256_000, MB, MB, 4 * MB];

/// Cost on a host core that encodes 5 GB/s.
const CORE: Cost = Cost { task_ns: 5 * US, kb_ns: 200 };
/// The accelerator that Ryu et al. measured, relative to this core: a fixed cost of the core's time
/// for 24 MB, and 10.3 times the core's time per byte.
const PAPER: Site =
    Site { server: Server::Batches(64 * MB), slots: 32, cost: Cost { task_ns: 4800 * US, kb_ns: 2060 } };

fn lanes(lanes: usize, slots: usize, cost: Cost) -> Site {
    Site { server: Server::Lanes(lanes), slots, cost }
}

const fn times(cost: Cost, factor: u64) -> Cost {
    Cost { task_ns: cost.task_ns * factor, kb_ns: cost.kb_ns * factor }
}

fn closed(callers: usize) -> Load {
    Load::Closed { callers, pause_ns: 0 }
}

fn pattern(name: &'static str, host: Site, offload: Site, load: Load, sizes: &'static [u64]) -> Pattern {
    Pattern { name, host, offload, load, sizes, change: None, from: S, until: 4 * S }
}

#[test]
fn hybrid_auto_reaches_nearly_the_throughput_of_the_best_fixed_ratio() {
    let host = lanes(1, 1, CORE);
    let slow = lanes(1, 2, times(CORE, 10));
    let pausing = |callers| Load::Closed { callers, pause_ns: 3 * MS };
    let open = |burst, every_ns| Load::Open { burst, every_ns };
    let swinging = Load::Swinging { callers: 64, few: 6, every_ns: 300 * MS };
    for (name, host, offload, load, sizes) in [
        ("many callers", host, slow, closed(64), MEDIUM),
        ("few callers", host, slow, closed(4), MEDIUM),
        ("one caller", host, slow, closed(1), MEDIUM),
        ("callers that pause", host, slow, pausing(32), MIXED),
        ("mixed sizes", host, slow, closed(32), MIXED),
        ("the paper's accelerator, 4 MB", host, PAPER, closed(64), LARGE),
        ("the paper's accelerator, 1 MB", host, PAPER, closed(64), MEDIUM),
        ("the paper's accelerator, few callers", host, PAPER, closed(16), LARGE),
        ("the paper's accelerator, mixed sizes", host, PAPER, closed(64), MIXED),
        ("equal places", host, lanes(1, 2, CORE), closed(16), MIXED),
        ("eight Arm cores", lanes(2, 2, CORE), lanes(8, 16, times(CORE, 4)), closed(48), MIXED),
        ("the offload is faster", lanes(1, 2, times(CORE, 3)), lanes(2, 4, CORE), closed(16), MEDIUM),
        ("light and open", host, slow, open(1, 400 * US), MEDIUM),
        ("overload", host, slow, open(1, 150 * US), MEDIUM),
        ("bursts", host, slow, open(80, 20 * MS), MIXED),
        ("callers come and go", host, slow, swinging, MEDIUM),
    ] {
        assert_auto_is_near_the_best(&pattern(name, host, offload, load, sizes));
    }
}

#[test]
fn hybrid_auto_is_near_the_best_fixed_ratio_a_second_after_costs_change() {
    let host = lanes(1, 1, CORE);
    let (fast, slow) = (lanes(1, 2, CORE), lanes(1, 2, times(CORE, 10)));
    let [slower, slowest] = [10, 20].map(|factor| times(CORE, factor));
    for (name, load, offload, before, after) in [
        ("the host slows down", closed(32), slow, CORE, (slower, slower)),
        ("the offload speeds up", closed(32), slow, CORE, (CORE, CORE)),
        ("the places change roles", closed(32), slow, CORE, (slower, CORE)),
        ("the offload speeds up, few callers", closed(5), slow, CORE, (CORE, CORE)),
        ("the host recovers", closed(32), fast, slowest, (CORE, slower)),
        ("the host recovers, one caller", closed(1), fast, slowest, (CORE, slower)),
    ] {
        let change = Some((3 * S, after.0, after.1));
        let host = Site { cost: before, ..host };
        let before = pattern(name, host, offload, load, MEDIUM);
        assert_auto_is_near_the_best(&Pattern { change, from: 4 * S, until: 7 * S, ..before });
    }
}

/// A slow DPU must help only with load that the host cannot carry, not with short waits.
#[test]
fn a_slow_dpu_gets_only_exploring_tasks_while_the_queue_is_short() {
    let slow = lanes(1, 2, times(CORE, 10));
    for (host, load, may_explore) in [
        (lanes(1, 1, CORE), closed(1), false),
        (lanes(4, 4, CORE), closed(4), false),
        (lanes(1, 1, CORE), Load::Open { burst: 1, every_ns: 300 * US }, false),
        (lanes(1, 1, CORE), Load::Open { burst: 5, every_ns: 2 * MS }, true),
        (lanes(1, 1, CORE), closed(2), true),
    ] {
        let pattern = pattern("short queue", host, slow, load, MEDIUM);
        let result = Simulation::run(&pattern, CodingMode::Auto);
        // A stale estimate is refreshed four times per second.
        let explored = if may_explore { 4 * pattern.until / S } else { 0 };
        assert!(
            result.offloaded == result.explored && result.explored <= explored,
            "{result:?}, {pattern:?}"
        );
    }
}

/// Creates a random pattern.
fn any_pattern(seed: u64) -> Pattern {
    let mut dice = SmallRng::seed_from_u64(seed);
    let core = Cost { task_ns: dice.random_range(0..50) * US, kb_ns: dice.random_range(100..800) };
    let cores = dice.random_range(1..=4);
    let host = lanes(cores, cores + dice.random_range(0..2), core);
    let offload = match dice.random_range(0..3) {
        0 => Site { cost: Cost { task_ns: core.kb_ns * 24_000, kb_ns: core.kb_ns * 103 / 10 }, ..PAPER },
        _ => {
            let count = dice.random_range(1..=8);
            lanes(count, 2 * count, times(core, dice.random_range(1..=12)))
        }
    };
    let sizes = [MEDIUM, LARGE, MIXED, &[256_000]][dice.random_range(0..4)];
    let mean = sizes.iter().sum::<u64>() / sizes.len() as u64;
    let host_ns = (core.task_ns + core.kb_ns * mean / 1000) / cores as u64;
    let few = 6 * cores;
    let callers = dice.random_range(few..=96);
    let load = match dice.random_range(0..3) {
        0 => closed(callers),
        1 => Load::Open { burst: 1, every_ns: (host_ns * dice.random_range(50..150) / 100).max(US) },
        _ => Load::Swinging { callers, few, every_ns: dice.random_range(50..500) * MS },
    };
    Pattern { until: 2 * S, ..pattern("any", host, offload, load, sizes) }
}

#[test]
fn hybrid_auto_is_near_the_best_fixed_ratio_on_random_patterns() {
    (0..20).for_each(|seed| assert_auto_is_near_the_best(&any_pattern(seed)));
}
