//! A node whose roles run on different machines. Network namespaces stand for the machines: the
//! store, the osd and the client each have their own, and links join them.

#![allow(clippy::print_stdout, reason = "a skipped test says so")]

use std::process::{Command, Stdio};

use serde_json::Value;

use common::Node;

mod common;

/// The measurement.
const BENCH: [&str; 13] = [
    "bench",
    "write",
    "--pool",
    "p",
    "--object-size",
    "64KiB",
    "--in-flight",
    "4",
    "--objects",
    "20",
    "--seconds",
    "1",
    "--json",
];

/// Arguments of `unshare` for the namespaces of [`MACHINES`].
const ENTER: [&str; 5] = ["--map-root-user", "--net", "--mount", "--fork", "--kill-child"];

/// Makes the namespaces `host`, `dpu` and `client`, starts a store and an osd, and measures. Arguments:
/// the program, the target, and the arguments of `outboard bench`. Prints the result of the measurement.
const MACHINES: &str = r#"
set -eu
outboard=$1 target=$2
shift 2
mount -t tmpfs none /run
mkdir -p /run/netns
for machine in host dpu client; do
    ip netns add $machine
    ip -n $machine link set lo up
done
ip link add eth0 netns host type veth peer name eth0 netns dpu
ip link add eth0 netns client type veth peer name eth1 netns dpu
ip -n host addr add 10.77.1.1/24 dev eth0
ip -n dpu addr add 10.77.1.2/24 dev eth0
ip -n dpu addr add 10.77.2.1/24 dev eth1
ip -n client addr add 10.77.2.2/24 dev eth0
ip -n host link set eth0 up
ip -n dpu link set eth0 up
ip -n dpu link set eth1 up
ip -n client link set eth0 up
ready() {
    until grep -q '"ready"' "$1"; do
        if grep -q '"failed"' "$1" || ! kill -0 $2; then cat "$1" >&2; kill $store; exit 1; fi
        sleep 0.05
    done
}
# The roles run in this directory, with the keys of the node that has made the target.
cp -r node/keys node/credentials.toml .
OUTBOARD_CHANNEL_OFI_LISTEN=10.77.1.1:0 ip netns exec host "$outboard" store --target "$target" --socket tcp:10.77.1.1:7401 >store.ready &
store=$!
ready store.ready $store
ip netns exec dpu "$outboard" osd --store-socket tcp:10.77.1.1:7401 --listen 10.77.2.1:7400 >osd.ready &
osd=$!
ready osd.ready $osd
measured=0
ip netns exec client "$outboard" --dir . --endpoint 10.77.2.1:7400 "$@" || measured=$?
kill $osd && wait $osd
kill $store && wait $store
exit $measured
"#;

/// Runs `outboard bench` in the namespace `client` against a store in `host` and an osd in `dpu`.
/// `None` if this user may not make namespaces.
fn bench_between_machines(node: &Node, engine: &str) -> Option<Value> {
    if !Command::new("unshare")
        .args(ENTER)
        .arg("true")
        .stderr(Stdio::null())
        .status()
        .is_ok_and(|s| s.success())
    {
        println!("SKIPPED: this user may not make network namespaces");
        return None;
    }
    let output = Command::new("unshare")
        .args(ENTER)
        .args(["sh", "-c", MACHINES, "sh", env!("CARGO_BIN_EXE_outboard"), "node/targets/0.img"])
        .args(BENCH)
        .current_dir(node.path("."))
        .env("OUTBOARD_CHANNEL_ENGINE", engine)
        .env_remove("OUTBOARD_ENDPOINT")
        .output()
        .unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    Some(serde_json::from_slice(&output.stdout).unwrap())
}

/// Adds the paths of all figures of `value` to `kinds`: numbers by `number`, and others by their type.
fn kinds_of(value: &Value, path: &str, kinds: &mut Vec<String>) {
    match value {
        Value::Object(fields) => {
            fields.iter().for_each(|(key, v)| kinds_of(v, &format!("{path}.{key}"), kinds))
        }
        Value::Number(_) => kinds.push(path.to_owned()),
        Value::Null => kinds.push(format!("{path} is null")),
        Value::Array(_) | Value::Bool(_) | Value::String(_) => {}
    }
}

#[test]
fn a_benchmark_reports_the_same_figures_if_the_roles_run_on_different_machines() {
    let node = Node::up(&["--placement", "dpu", "--targets", "1", "--target-size", "256MiB"]);
    node.ok(&["pool", "create", "p"]);
    let here: Value = serde_json::from_slice(&node.ok(&BENCH)).unwrap();
    node.ok(&["down"]);
    let Some(apart) = bench_between_machines(&node, "ofi:tcp") else { return };

    let kinds = |report: &Value| {
        let mut kinds = Vec::new();
        for key in ["host_cpu_us_per_op", "node_cpu_us_per_op", "latency_us", "breakdown_us", "iops"] {
            kinds_of(&report[key], key, &mut kinds);
        }
        kinds.sort();
        kinds
    };
    assert_eq!(kinds(&apart), kinds(&here));
    assert_eq!(apart["placement"], "dpu");
    assert!(apart["host_cpu_us_per_op"].as_f64().unwrap() > 0.0, "{apart:#}");
    assert!(apart["node_cpu_us_per_op"].as_f64() > apart["host_cpu_us_per_op"].as_f64(), "{apart:#}");
    let process = |report: &Value, role: &str| {
        let processes = report["processes"].as_array().unwrap();
        processes
            .iter()
            .find(|p| p["role"] == role)
            .unwrap_or_else(|| panic!("no {role}: {report:#}"))
            .clone()
    };
    for role in ["store", "osd", "client"] {
        let (apart, here) = (process(&apart, role), process(&here, role));
        for key in ["cpu_seconds", "user_seconds", "system_seconds", "context_switches", "wake_ups"] {
            assert!(apart[key].is_number() && here[key].is_number(), "{role}: {key}");
        }
        // The engine differs: `shm` needs shared memory, and `ofi` has threads on both sides.
        let classes = |process: &Value| {
            let classes = process["by_class"].as_object().unwrap().keys();
            classes.filter(|class| !["dma", "ofi"].contains(&class.as_str())).cloned().collect::<Vec<_>>()
        };
        assert_eq!(classes(&apart), classes(&here), "{role}");
    }
    let store = process(&apart, "store");
    assert!(store["by_class"]["ofi"]["cpu_seconds"].as_f64().unwrap() > 0.0, "{store:#}");
    assert!(process(&apart, "osd")["by_class"]["msgr"]["wake_ups"].as_u64().unwrap() > 0);
}
