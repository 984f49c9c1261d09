//! The page's section about writes over each network stack by the number of requests in flight,
//! next to published results of Ceph over RDMA.

use super::svg::{self, Grouped, Series};
use super::text::{cell, number, table};
use crate::evaluation::sample::{Measurements, Sample};
use crate::evaluation::stats::{Estimate, Rounds, estimate, ratio};
use crate::evaluation::workload::{Case, IN_FLIGHT_SWEEP, Network};

/// Title of the publication (Intel, 2018).
const TITLE: &str = "Leveraging RDMA Technologies to Accelerate Ceph Storage Solutions";

/// Queue depth and ratio of the largest gain of RDMA over TCP/IP, from figure 6 of the publication.
/// The publication's text states no other value of this figure.
const MOST_GAINED: (u32, f64) = (2, 1.17);

/// The network stacks with their classes in the style sheet.
const STACKS: [(Network, &str); 2] = [(Network::Tcp, "p7"), (Network::OfiTcp, "p4")];

type FigureOf = fn(&Sample) -> f64;

/// Formats the section. It is empty if no network stacks were compared.
pub fn section(m: &Measurements) -> String {
    let was_measured = |n: &u32| m.samples.iter().any(|s| s.case.network.is_some() && s.case.in_flight == *n);
    let depths: Vec<u32> = IN_FLIGHT_SWEEP.into_iter().filter(was_measured).collect();
    if depths.is_empty() {
        return String::new();
    }
    format!(
        "<section><h2>Network stacks: 4 KiB writes by requests in flight</h2>{SETTING}{}{}{}{}{}</section>",
        published(),
        rates(m, &depths),
        cpu(m, &depths),
        profile(m, &depths),
        LIMITS
    )
}

const SETTING: &str = "<p>The same node (dpu, memcpy) and the same client use two network stacks: <b>tcp</b>, and <b>ofi:tcp</b>, which is the code for RDMA \
     over libfabric's provider for TCP. At each number of requests in flight, both stacks run in direct succession, and the stack that runs first alternates. To save time, this comparison runs \
     only in every other round. Its intervals are therefore based on half as many rounds (with seven rounds, on four: these intervals are ranges and prove little).</p>";

const LIMITS: &str = "<h3>Limits of the comparison</h3><ul>\
     <li>No RDMA hardware is used: ofi:tcp is libfabric over loopback TCP, in software, on CPUs that it shares with all other parts. The article's gain comes from \
     hardware that moves messages without the kernel, so this gain <b>cannot appear here</b>. The results show the cost of the RDMA code if software does all the work.</li>\
     <li>The writes have random offsets in 128 objects of 4 MiB. The article's writes have random offsets in volumes of 30 GB.</li>\
     <li>CPU here is the CPU time of node and client per write, on one machine. The article states the CPU utilization of an osd node.</li>\
     <li>A client that cannot connect over its stack fails. If a connection over ofi:tcp broke during a run, the client would continue over TCP.</li></ul>";

fn published() -> String {
    let (depth, gain) = MOST_GAINED;
    format!(
        "<p>For comparison: figure 6 of <cite>{TITLE}</cite> (Intel, 2018) compares TCP/IP with iWARP in Ceph's messenger. Its setup has two nodes with four OSDs each, two \
         copies, two clients and 10 Gbit/s (X722). fio writes 4 KiB at random offsets with queue depths from 1 to 32. For 6 (a), operations per second, the article's text states one number: RDMA is \
         up to {} % faster, at queue depth {depth}. The text adds that the benefit is more obvious at low depths. For 6 (b), CPU utilization of an OSD node, the text states no number. Utilization was higher with RDMA \
         than with TCP/IP, and so were the operations per CPU cycle. The article names two causes: two polling threads, and one more copy of each message. The article shows all other values only in \
         its drawing. Its queue depth applies to each fio, and the text does not state the number of volumes.</p>",
        number(100.0 * (gain - 1.0))
    )
}

fn of(m: &Measurements, network: Network, in_flight: u32, figure: FigureOf) -> Rounds {
    m.rounds(&Case::over(network, in_flight), figure)
}

fn median(rounds: &Rounds) -> Option<Estimate> {
    estimate(rounds.values().copied())
}

/// Formats three cells: the value over TCP, the value over libfabric, and the ratio of libfabric to
/// TCP.
fn compared(m: &Measurements, in_flight: u32, figure: FigureOf) -> [String; 3] {
    let [tcp, ofi] = Network::ALL.map(|network| of(m, network, in_flight, figure));
    [cell(median(&tcp)), cell(median(&ofi)), cell(median(&ratio(&ofi, &tcp)))]
}

fn chart(m: &Measurements, depths: &[u32], title: &str, axis: &str, figure: FigureOf) -> String {
    let series = STACKS.map(|(network, class)| Series {
        name: network.name().to_owned(),
        class,
        values: depths.iter().map(|n| median(&of(m, network, *n, figure))).collect(),
    });
    svg::grouped(&[Grouped {
        title: title.to_owned(),
        axis: axis.to_owned(),
        groups: depths.iter().map(u32::to_string).collect(),
        series: series.into(),
    }])
}

fn rates(m: &Measurements, depths: &[u32]) -> String {
    let row = |n: &u32| {
        let article = if *n == MOST_GAINED.0 { number(MOST_GAINED.1) } else { "–".to_owned() };
        let [tcp, ofi, _] = compared(m, *n, |s| s.latency_us_mean);
        let p99 = Network::ALL.map(|network| {
            cell(estimate(m.rounds_if(&Case::over(network, *n), |s| s.latency_us_p99).into_values()))
        });
        let rates = compared(m, *n, |s| s.iops);
        [n.to_string()].into_iter().chain(rates).chain([article, tcp, ofi]).chain(p99).collect()
    };
    let rows: Vec<Vec<String>> = depths.iter().map(row).collect();
    let head = [
        "in flight",
        "op/s, tcp",
        "op/s, ofi:tcp",
        "ofi:tcp / tcp",
        "article, RDMA / TCP",
        "mean latency, µs, tcp",
        "mean latency, µs, ofi:tcp",
        "p99, µs, tcp",
        "p99, µs, ofi:tcp",
    ];
    let title = "Durable writes by requests in flight";
    format!(
        "<h3>Operations and latency</h3>{}{}",
        chart(m, depths, title, "thousand per second", |s| s.iops / 1e3),
        table(&head, &rows)
    )
}

fn cpu(m: &Measurements, depths: &[u32]) -> String {
    let row = |n: &u32| {
        let all = compared(m, *n, |s| s.node_cpu_us_per_op);
        let client = compared(m, *n, |s| s.client_cpu_us_per_op);
        [n.to_string()].into_iter().chain(all).chain(client).collect()
    };
    let rows: Vec<Vec<String>> = depths.iter().map(row).collect();
    let head = [
        "in flight",
        "all CPU, µs/op, tcp",
        "all CPU, µs/op, ofi:tcp",
        "ofi:tcp / tcp",
        "client CPU, µs/op, tcp",
        "client CPU, µs/op, ofi:tcp",
        "ofi:tcp / tcp",
    ];
    let title = "All CPU per write by requests in flight";
    format!(
        "<h3>CPU per write</h3>{}{}",
        chart(m, depths, title, "µs per write", |s| s.node_cpu_us_per_op),
        table(&head, &rows)
    )
}

/// Formats the user and system time of the node's processes, and their wake-ups (figure 7 of the
/// publication).
fn profile(m: &Measurements, depths: &[u32]) -> String {
    let row = |n: &u32| {
        let figures: [FigureOf; 3] = [|s| s.user_us_per_op, |s| s.system_us_per_op, |s| s.wake_ups_per_op];
        [n.to_string()].into_iter().chain(figures.into_iter().flat_map(|of| compared(m, *n, of))).collect()
    };
    let rows: Vec<Vec<String>> = depths.iter().map(row).collect();
    let head = [
        "in flight",
        "user, µs/op, tcp",
        "ofi:tcp",
        "ofi:tcp / tcp",
        "system, µs/op, tcp",
        "ofi:tcp",
        "ofi:tcp / tcp",
        "wake-ups/op, tcp",
        "ofi:tcp",
        "ofi:tcp / tcp",
    ];
    format!(
        "<h3>User and system time, and wake-ups</h3>{}<p class=\"soft\">The processes of the node, without the client. Figure 7 of the article shows that Ceph uses more user time and less system time over \
         RDMA than over TCP/IP, without numbers.</p>",
        table(&head, &rows)
    )
}
