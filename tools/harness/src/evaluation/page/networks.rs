//! Writes over each network stack by the number of requests in flight, next to published results of
//! Ceph over RDMA.

use super::svg::{self, Grouped, Series};
use super::text::{cell, number, table};
use crate::evaluation::sample::{Measurements, Sample};
use crate::evaluation::stats::{Estimate, Rounds, estimate, ratio};
use crate::evaluation::workload::{Case, IN_FLIGHT_SWEEP, Network};

/// Title of the publication (Intel, 2018).
const TITLE: &str = "Leveraging RDMA Technologies to Accelerate Ceph Storage Solutions";

/// Queue depth and ratio of the largest gain of RDMA over TCP/IP, from figure 6 of the publication.
/// Its text has no other value of that figure.
const MOST_GAINED: (u32, f64) = (2, 1.17);

/// The network stacks with their classes in the style sheet.
const STACKS: [(Network, &str); 2] = [(Network::Tcp, "p7"), (Network::OfiTcp, "p4")];

type FigureOf = fn(&Sample) -> f64;

/// Formats the section; empty if no network stacks were compared.
pub fn section(m: &Measurements) -> String {
    let was_measured = |n: &u32| m.samples.iter().any(|s| s.case.network.is_some() && s.case.in_flight == *n);
    let depths: Vec<u32> = IN_FLIGHT_SWEEP.into_iter().filter(was_measured).collect();
    if depths.is_empty() {
        return String::new();
    }
    format!(
        "<section><h2>Network stacks: 4 KiB writes by requests in flight</h2>{SETTING}{}{}{}{}</section>",
        published(),
        rates(m, &depths),
        cpu(m, &depths),
        LIMITS
    )
}

const SETTING: &str = "<p>The same node (dpu, memcpy), the same client, and two ways between them: <b>tcp</b>, and <b>ofi:tcp</b>, which is what goes over RDMA, \
     but over libfabric's provider for TCP. At each number in flight both run one right after the other, and who goes first alternates. To save time this is done \
     in every other round only, so the intervals rest on half as many rounds (of seven, on four: they are ranges, and prove little).</p>";

const LIMITS: &str = "<h3>To bear in mind</h3><ul>\
     <li>No RDMA hardware is used: ofi:tcp is libfabric over loopback TCP, in software, on the CPUs that all else shares. What the article gains because \
     hardware carries the messages past the kernel <b>cannot show here</b>; what shows is what that way costs when software does everything.</li>\
     <li>Each write replaces a whole object of 4 KiB, one object after the other, over and over. The article's writes go to random offsets of volumes of 30 GB.</li>\
     <li>CPU here is what a write costs, by the node and the client on one machine. The article's is the utilization of an OSD node.</li>\
     <li>A client that cannot connect over its stack fails. One whose connection over ofi:tcp broke in the middle of a run would go on over TCP.</li></ul>";

fn published() -> String {
    let (depth, gain) = MOST_GAINED;
    format!(
        "<p>Beside it: figure 6 of <cite>{TITLE}</cite> (Intel, 2018), which compares TCP/IP with iWARP in Ceph's messenger: two nodes with four OSDs each, two \
         copies, two clients, 10 Gbit/s (X722); fio, random writes of 4 KiB at queue depths from 1 to 32. Of 6 (a), operations per second, its text has one number: RDMA is ahead by \
         up to {} %, at queue depth {depth}; the benefit is more obvious at low depths. Of 6 (b), CPU of an OSD node, it has none: utilization was higher with RDMA \
         than with TCP/IP, and so were the operations per CPU cycle; the article blames two threads that poll and one more copy of each message. All other values are in \
         its drawing only. Its depth is that of each fio; on how many volumes it ran the text does not say.</p>",
        number(100.0 * (gain - 1.0))
    )
}

fn of(m: &Measurements, network: Network, in_flight: u32, figure: FigureOf) -> Rounds {
    m.rounds(&Case::over(network, in_flight), figure)
}

fn median(rounds: &Rounds) -> Option<Estimate> {
    estimate(rounds.values().copied())
}

/// Formats cells for TCP, for libfabric, and for the ratio of libfabric to TCP.
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
        let rates = compared(m, *n, |s| s.iops);
        [n.to_string()].into_iter().chain(rates).chain([article, tcp, ofi]).collect()
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
