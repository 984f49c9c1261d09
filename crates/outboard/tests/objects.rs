//! Tests of the object commands as scripts use them: their output and exit codes. The tests run on
//! a real node in both placements, and on the reference engine.

use identity::{Credentials, Identity};
use std::fs;
use std::io::{BufRead, BufReader, Read, Write};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{FileTypeExt, MetadataExt, PermissionsExt, symlink};
use std::path::Path;
use std::process::{Command, Output, Stdio};

use rustix::process::{Pid, Signal, kill_process};

/// The engines on which the object commands run: a node in each placement, and the reference
/// engine.
const ENGINES: [&str; 3] = ["dpu", "host", "mem"];

/// A node in a temporary directory, or a file of the reference engine. Dropping the value stops the
/// node.
struct Node {
    dir: tempfile::TempDir,
    engine: &'static str,
}

impl Node {
    fn up(engine: &'static str) -> Node {
        let node = Node { dir: tempfile::tempdir().unwrap(), engine };
        if engine != "mem" {
            let up = ["up", "--detach", "--placement", engine, "--targets", "2", "--target-size", "256MiB"];
            node.ok(&[&up[..], &["--listen", "127.0.0.1:0"]].concat());
        }
        node.ok(&["pool", "create", "p"]);
        node
    }

    fn command(&self, args: &[&str]) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_outboard"));
        command.args(args);
        match self.engine {
            "mem" => command.env("OUTBOARD_ENDPOINT", format!("mem:{}", self.path("objects"))),
            _ => {
                let dir = self.dir.path().join("node");
                command.env("OUTBOARD_DIR", dir).env_remove("OUTBOARD_ENDPOINT")
            }
        };
        command
    }

    fn run(&self, args: &[&str]) -> Output {
        self.command(args).stdin(Stdio::null()).output().unwrap()
    }

    /// Runs a command that must succeed. Returns its standard output.
    fn ok(&self, args: &[&str]) -> Vec<u8> {
        let output = self.run(args);
        assert!(output.status.success(), "outboard {args:?}: {}", String::from_utf8_lossy(&output.stderr));
        output.stdout
    }

    fn text(&self, args: &[&str]) -> String {
        String::from_utf8(self.ok(args)).unwrap()
    }

    /// Runs a command that must fail with the exit status `status`. Returns its standard error.
    fn fails(&self, status: i32, args: &[&str]) -> String {
        let output = self.run(args);
        let stderr = String::from_utf8(output.stderr).unwrap();
        assert_eq!(output.status.code(), Some(status), "outboard {args:?}: {stderr}");
        assert!(output.stdout.is_empty(), "errors go to standard error");
        stderr
    }

    fn path(&self, name: &str) -> String {
        self.dir.path().join(name).to_str().unwrap().to_owned()
    }
}

impl Drop for Node {
    fn drop(&mut self) {
        if self.engine != "mem" {
            self.run(&["down"]);
        }
    }
}

/// Returns pseudo-random bytes, which are the same in every call.
fn noise(len: usize) -> Vec<u8> {
    let mut x = 88_172_645_463_325_252_u64;
    (0..len)
        .map(|_| {
            x ^= x << 13;
            x ^= x >> 7;
            x ^= x << 17;
            x as u8
        })
        .collect()
}

#[test]
fn objects_can_be_written_read_listed_and_removed() {
    for engine in ENGINES {
        let node = Node::up(engine);
        for (name, len) in [("empty", 0), ("one", 1), ("odd", 70_001), ("large", 20_000_003)] {
            let (file, back) = (node.path(name), node.path("back"));
            fs::write(&file, noise(len)).unwrap();
            node.ok(&["put", &format!("p/{name}"), &file]);
            node.ok(&["get", &format!("p/{name}"), &back]);
            assert_eq!(fs::read(&file).unwrap(), fs::read(&back).unwrap(), "{engine} {name}");
        }
        let mut put = node.command(&["put", "p:ns/from-a-pipe", "-"]).stdin(Stdio::piped()).spawn().unwrap();
        put.stdin.take().unwrap().write_all(&noise(40_000_000)).unwrap();
        assert!(put.wait().unwrap().success());
        assert_eq!(node.ok(&["get", "p:ns/from-a-pipe", "-"]), noise(40_000_000));

        let pipe = node.path("pipe");
        assert!(Command::new("mkfifo").arg(&pipe).status().unwrap().success());
        let mut reader = Command::new("cat").arg(&pipe).stdout(Stdio::piped()).spawn().unwrap();
        node.ok(&["get", "p/odd", &pipe]);
        assert!(fs::metadata(&pipe).unwrap().file_type().is_fifo(), "`get` has not replaced the pipe");
        let mut data = vec![];
        reader.stdout.take().unwrap().read_to_end(&mut data).unwrap();
        assert_eq!(data, noise(70_001));
        reader.wait().unwrap();
        assert!(node.fails(1, &["cp", "outboard:p/odd", &pipe]).contains("pipe"));
        fs::remove_file(&pipe).unwrap();

        let mut names: Vec<String> = node.text(&["ls", "p"]).lines().map(str::to_owned).collect();
        names.sort();
        assert_eq!(names, ["empty", "large", "odd", "one"], "parts and other namespaces are not listed");
        assert_eq!(node.text(&["ls", "p", "--sort", "name"]), "empty\nlarge\nodd\none\n");
        let json: Vec<String> =
            serde_json::from_slice(&node.ok(&["ls", "p", "--sort", "name", "--all-namespaces", "--json"]))
                .unwrap();
        assert!(json.is_sorted() && json.len() > 4 && json[0] == "/empty", "{json:?}");
        assert_eq!(node.text(&["ls", "p", "--sort", "none"]).lines().count(), 4);
        assert_eq!(node.text(&["ls", "p", "--prefix", "o", "--json"]).matches("\"o").count(), 2);
        let stat: serde_json::Value = serde_json::from_slice(&node.ok(&["stat", "p/odd", "--json"])).unwrap();
        assert_eq!(stat["size"], 70_001);
        assert!(stat["version"].as_u64().unwrap() > 0);

        node.ok(&["rm", "p/odd"]);
        assert!(node.fails(1, &["stat", "p/odd"]).contains("does not exist"));
        assert!(node.fails(1, &["rm", "p/odd"]).contains("does not exist"));
        node.ok(&["rm", "--force", "p/odd"]);
        assert!(node.fails(1, &["pool", "rm", "p"]).contains("not empty"));
    }
}

#[test]
fn errors_about_wrong_arguments_say_what_to_do() {
    for engine in ["host", "mem"] {
        assert_errors_say_what_to_do(&Node::up(engine));
    }
}

fn assert_errors_say_what_to_do(node: &Node) {
    assert!(node.fails(2, &["put", "no-slash", "/dev/null"]).contains("POOL/OBJECT"));
    assert!(node.fails(2, &["get", &format!("p/{}", "x".repeat(1025)), "-"]).contains("1024"));
    assert!(node.fails(1, &["get", "nowhere/x", "-"]).contains("pool"));
    assert!(node.fails(1, &["put", "p/x", "/does/not/exist"]).contains("/does/not/exist"));
    assert!(node.fails(2, &["cp", "/etc/hostname", "/tmp/x"]).contains("outboard:"));
    assert!(node.fails(2, &["cp", "/etc", "outboard:p"]).contains("-r"));
    assert!(node.fails(2, &["bench", "sideways"]).contains("sideways"));
    assert!(node.fails(1, &["pool", "create", "p"]).contains("exists"));
    assert!(node.fails(2, &["pool", "create", "a/b"]).contains("letters"));
    let dir = tempfile::tempdir().unwrap();
    let credentials = dir.path().join("user.toml");
    let (node, identity) = (Identity::generate().key(), Identity::generate());
    Credentials { user: "main/user".into(), node, identity }.create(&credentials).unwrap();
    // Nothing listens at this address.
    let unreachable = |args: &[&str]| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_outboard"));
        command.args(["--endpoint", "127.0.0.1:1", "ls", "p"]).args(args).current_dir(dir.path());
        command.env_remove("OUTBOARD_DIR").env_remove("OUTBOARD_CREDENTIALS");
        let output = command.output().unwrap();
        assert_eq!(output.status.code(), Some(1));
        String::from_utf8_lossy(&output.stderr).into_owned()
    };
    assert!(unreachable(&["--credentials", credentials.to_str().unwrap()]).contains("127.0.0.1:1"));
    assert!(unreachable(&[]).contains("--credentials"));
}

#[test]
fn a_copied_tree_keeps_its_files_links_modes_and_times() {
    for engine in ["dpu", "mem"] {
        assert_a_copied_tree_is_unchanged(&Node::up(engine));
    }
}

fn assert_a_copied_tree_is_unchanged(node: &Node) {
    let tree = node.dir.path().join("tree");
    fs::create_dir_all(tree.join("deep/er")).unwrap();
    fs::create_dir(tree.join("empty")).unwrap();
    fs::write(tree.join("plain"), noise(100)).unwrap();
    fs::write(tree.join("deep/er/large"), noise(3_000_001)).unwrap();
    fs::write(tree.join("zero"), b"").unwrap();
    fs::write(tree.join(Path::new(std::ffi::OsStr::from_bytes(b"latin\xe9"))), b"raw name").unwrap();
    fs::write(tree.join("100% sure"), b"percent").unwrap();
    fs::set_permissions(tree.join("plain"), fs::Permissions::from_mode(0o4750)).unwrap();
    fs::set_permissions(tree.join("deep/er"), fs::Permissions::from_mode(0o750)).unwrap();
    symlink("../plain", tree.join("deep/link")).unwrap();
    symlink("/does/not/exist", tree.join("dangling")).unwrap();

    let (from, to) = (node.path("tree"), node.path("out"));
    node.ok(&["cp", "-r", &from, "outboard:p/a/tree"]);
    node.ok(&["cp", "-r", "outboard:p/a/tree", &to]);
    assert_eq!(describe(&tree), describe(Path::new(&to)));

    let again = node.run(&["cp", "-r", &from, "outboard:p/a/tree"]);
    let said = String::from_utf8(again.stderr).unwrap();
    assert!(said.contains("copied 0 paths"), "an up-to-date file is not copied again: {said}");
    fs::write(tree.join("plain"), noise(101)).unwrap();
    let again = node.run(&["cp", "-r", &from, "outboard:p/a/tree"]);
    let said = String::from_utf8(again.stderr).unwrap();
    assert!(said.contains("copied 1 paths"), "a changed file is copied again: {said}");

    node.ok(&["cp", &node.path("tree/zero"), "outboard:p/single/"]);
    node.ok(&["cp", "outboard:p/single/zero", &node.path("zero-back")]);
    assert_eq!(fs::read(node.path("zero-back")).unwrap(), b"");
}

/// Describes every path below `root` by its type, mode, size, time and content.
fn describe(root: &Path) -> Vec<String> {
    let mut all: Vec<String> = walkdir::WalkDir::new(root)
        .min_depth(1)
        .into_iter()
        .map(|entry| {
            let entry = entry.unwrap();
            let name =
                entry.path().strip_prefix(root).unwrap().as_os_str().as_bytes().escape_ascii().to_string();
            let meta = entry.metadata().unwrap();
            let kind = entry.file_type();
            match kind {
                k if k.is_symlink() => {
                    format!("{name} -> {}", fs::read_link(entry.path()).unwrap().display())
                }
                k if k.is_dir() => format!("{name}/ {:o}", meta.mode()),
                _ => {
                    let content = base::block::crc32c(&fs::read(entry.path()).unwrap());
                    format!("{name} {:o} {} {} {content:x}", meta.mode(), meta.len(), meta.mtime_nsec())
                }
            }
        })
        .collect();
    all.sort();
    all
}

#[test]
fn bench_prints_the_json_fields_that_scripts_use() {
    let node = Node::up("dpu");
    let args = [
        "--pool",
        "p",
        "--object-size",
        "4KiB",
        "--in-flight",
        "4",
        "--seconds",
        "1",
        "--objects",
        "50",
        "--json",
    ];
    for workload in ["write", "read", "randread", "randwrite", "randrw"] {
        let out: serde_json::Value =
            serde_json::from_slice(&node.ok(&[&["bench", workload], &args[..]].concat())).unwrap();
        assert_eq!(out["workload"], workload);
        assert_eq!(out["object_size"], 4096);
        assert_eq!(out["placement"], "dpu");
        assert_eq!(out["errors"], 0);
        assert!(out["ops"].as_u64().unwrap() > 0);
        for key in ["seconds", "mb_per_s", "iops", "host_cpu_us_per_op", "node_cpu_us_per_op"] {
            assert!(out[key].as_f64().unwrap() > 0.0, "{key}: {out}");
        }
        for key in ["mean", "p50", "p99", "p999", "max"] {
            assert!(out["latency_us"][key].as_f64().unwrap() > 0.0, "{key}: {out}");
        }
        assert_eq!((&out["clients"], &out["objects"]), (&1.into(), &50.into()));
        assert!(out["rate"].is_null() && out["not_started"].is_null(), "the loop is closed: {out}");
        let kinds: Vec<&String> = out["by_kind"].as_object().unwrap().keys().collect();
        match workload {
            "randrw" => assert_eq!(kinds, ["read", "write"]),
            "write" | "randwrite" => assert_eq!(kinds, ["write"]),
            _ => assert_eq!(kinds, ["read"]),
        }
        let processes = out["processes"].as_array().unwrap();
        for role in ["store", "osd", "client"] {
            let process =
                processes.iter().find(|p| p["role"] == role).unwrap_or_else(|| panic!("no {role}: {out}"));
            assert!(
                process["cpu_seconds"].as_f64().is_some() && process["context_switches"].as_u64().is_some()
            );
            assert!(!process["by_class"].as_object().unwrap().is_empty());
        }
        let class = |name: &str| {
            let osd = processes.iter().find(|p| p["role"] == "osd").unwrap();
            osd["by_class"][name].clone()
        };
        for name in ["msgr", "osd"] {
            assert!(class(name)["cpu_seconds"].as_f64().unwrap() > 0.0, "{name}: {out}");
            assert_eq!(class(name)["estimated"], true, "{name} shares a thread: {out}");
        }
        assert!(class("msgr")["context_switches"].is_null(), "context switches cannot be divided: {out}");
        assert_breakdown_adds_up(&out);
        assert!(out["breakdown_us"]["dma"].as_f64().unwrap() > 0.0, "ring entries count as DMA: {out}");
    }
}

/// The harness kills a store at a fixed time after this line.
#[test]
fn bench_announces_the_start_of_the_measurement_after_the_preparation() {
    let node = Node::up("mem");
    let args = ["bench", "read", "--pool", "p", "--object-size", "4KiB", "--objects", "10"];
    let output = node.run(&[&args[..], &["--seconds", "1", "--announce"]].concat());
    assert_eq!(String::from_utf8(output.stderr).unwrap(), "outboard: the measurement has started\n");
    let missing = [&args[..3], &["nowhere", "--seconds", "1", "--announce"]].concat();
    assert!(!node.fails(1, &missing).contains("started"), "the objects cannot be prepared");
}

#[test]
fn an_interrupted_bench_reports_what_it_has_measured() {
    let node = Node::up("mem");
    let args = ["bench", "write", "--pool", "p", "--object-size", "4KiB", "--objects", "10"];
    let mut command = node.command(&[&args[..], &["--seconds", "3600", "--announce", "--json"]].concat());
    let mut bench = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let mut line = String::new();
    BufReader::new(bench.stderr.as_mut().unwrap()).read_line(&mut line).unwrap();
    assert!(line.contains("started"), "{line}");
    std::thread::sleep(std::time::Duration::from_millis(200));
    kill_process(Pid::from_child(&bench), Signal::INT).unwrap();
    let output = bench.wait_with_output().unwrap();
    assert_eq!(output.status.code(), Some(130), "{output:?}");
    let out: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    let seconds = out["seconds"].as_f64().unwrap();
    assert!(out["interrupted"] == true && seconds < 3600.0 && out["ops"].as_u64().unwrap() > 0, "{out}");
    assert_eq!(out["per_second"].as_array().unwrap().len(), seconds as usize, "{out}");
}

/// Three clients read and write at a low rate, so that all operations that are due are started.
#[test]
fn bench_starts_operations_of_several_clients_at_a_fixed_rate() {
    let node = Node::up("dpu");
    let load = ["bench", "randrw", "--pool", "p", "--object-size", "4KiB", "--objects", "100"];
    let rate = ["--reads", "80", "--clients", "3", "--rate", "200", "--seconds", "2", "--json"];
    let out: serde_json::Value = serde_json::from_slice(&node.ok(&[&load[..], &rate].concat())).unwrap();
    assert_eq!((&out["clients"], &out["rate"]), (&3.into(), &200.into()));
    let count = |value: &serde_json::Value| value.as_u64().unwrap_or_else(|| panic!("{value} in {out}"));
    let (ops, errors, not_started) = (count(&out["ops"]), &out["errors"], count(&out["not_started"]));
    assert_eq!((ops + not_started, errors), (400, &0.into()), "{out}");
    let [reads, writes] = ["read", "write"].map(|kind| count(&out["by_kind"][kind]["ops"]));
    assert!(reads + writes == ops && reads > 2 * writes && writes > 0, "{reads} reads, {writes} writes");
    let per_second: Vec<u64> = out["per_second"].as_array().unwrap().iter().map(count).collect();
    assert!(per_second.len() == 2 && per_second.iter().sum::<u64>() <= ops, "{out}");
    assert_eq!(out["min_per_second"], *per_second.iter().min().unwrap());
    assert!(out["longest_pause_ms"].is_u64(), "{out}");
    let text = node.text(&[&load[..], &rate[..8]].concat());
    for words in ["of 3 clients", "200 op/s due", "in the worst second", "longest pause", "read ", "write "] {
        assert!(text.contains(words), "{words}: {text}");
    }
    let too_many = ["--in-flight", "2", "--clients", "3"];
    assert!(node.fails(2, &[&load[..], &too_many].concat()).contains("raise --in-flight"));
}

/// More operations are due than the node can perform.
#[test]
fn bench_counts_latency_from_the_moment_an_operation_is_due() {
    let node = Node::up("dpu");
    let args = ["bench", "write", "--pool", "p", "--object-size", "4KiB", "--objects", "10"];
    let rate = ["--in-flight", "1", "--rate", "1000000", "--seconds", "1", "--json"];
    let out: serde_json::Value = serde_json::from_slice(&node.ok(&[&args[..], &rate].concat())).unwrap();
    assert!(out["not_started"].as_u64().unwrap() > 100_000, "{out}");
    let median = out["latency_us"]["p50"].as_f64().unwrap();
    assert!((300_000.0..900_000.0).contains(&median), "half of the operations wait for 0.5 s or more: {out}");
}

fn assert_breakdown_adds_up(out: &serde_json::Value) {
    let us = |key: &str| out["breakdown_us"][key].as_f64().unwrap_or_else(|| panic!("no {key}: {out}"));
    let sum = us("host_write") + us("dma") + us("dma_wait") + us("others");
    assert!(us("total") > 0.0 && (sum - us("total")).abs() < 1e-6 * us("total"), "{out}");
    assert!(us("requests_per_op") > 0.0, "{out}");
}

#[test]
fn bench_prints_the_time_of_large_writes_by_phase() {
    let node = Node::up("host");
    let args = ["bench", "write", "--pool", "p", "--objects", "8", "--in-flight", "2", "--seconds", "1"];
    let out: serde_json::Value =
        serde_json::from_slice(&node.ok(&[&args[..], &["--json"]].concat())).unwrap();
    assert_eq!(out["object_size"], 4 << 20);
    assert_breakdown_adds_up(&out);
    assert!(
        out["breakdown_us"]["host_write"].as_f64().unwrap() > 0.0,
        "part of the time is spent in the store: {out}"
    );
    let status: serde_json::Value = serde_json::from_slice(&node.ok(&["status", "--json"])).unwrap();
    assert!(status["osd"]["times"]["write"]["host_ns"].as_u64().unwrap() > 0, "{status}");
    let text = node.text(&args);
    assert!(text.contains("host write") && text.contains("dma wait"), "{text}");
}

#[test]
fn disks_can_be_imported_exported_and_measured_without_a_gateway() {
    for engine in ENGINES {
        let node = Node::up(engine);
        let (image, back) = (node.path("image"), node.path("back"));
        let file = fs::File::create(&image).unwrap();
        file.set_len(20 << 20).unwrap();
        std::os::unix::fs::FileExt::write_all_at(&file, &noise(5_000_000), 6 << 20).unwrap();
        let import = ["disk", "import", "p/vm", &image];
        let imported: serde_json::Value =
            serde_json::from_slice(&node.ok(&[&import[..], &["--json"]].concat())).unwrap();
        assert_eq!((&imported["created"], &imported["size"]), (&true.into(), &(20 << 20).into()), "{engine}");
        assert!(imported["written"].as_u64().unwrap() < 6_000_000, "{engine}: {imported}");
        assert!(node.fails(1, &import).contains("--overwrite"));
        node.ok(&["disk", "export", "p/vm", &back]);
        assert!(fs::read(&image).unwrap() == fs::read(&back).unwrap(), "{engine}");
        assert!(fs::metadata(&back).unwrap().blocks() * 512 < 8 << 20, "{engine}: the file is sparse");
        assert!(node.ok(&["disk", "export", "p/vm", "-"]) == fs::read(&image).unwrap(), "{engine}");
        let resumed: serde_json::Value =
            serde_json::from_slice(&node.ok(&[&import[..], &["--resume", "--json"]].concat())).unwrap();
        assert_eq!((&resumed["created"], &resumed["written"]), (&false.into(), &0.into()), "{engine}");
        let bench = ["bench", "disk", "p/vm", "--seconds", "1", "--rounds", "1", "--span", "8MiB", "--json"];
        let measured: serde_json::Value =
            serde_json::from_slice(&node.ok(&[&bench[..], &["--workload", "mix"]].concat())).unwrap();
        for subject in ["disk", "ranges", "whole"] {
            let of_subject = &measured["subjects"][subject];
            assert!(of_subject["ops"].as_u64().unwrap() > 0, "{engine} {subject}: {measured}");
            assert_eq!(of_subject["errors"], 0, "{engine} {subject}: {measured}");
        }
    }
}
