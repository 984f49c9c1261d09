//! `make demo`: runs a node with real files. The demo copies a directory tree into the node and
//! kills the store during the copy. It copies the tree back out and kills the osd during that copy.
//! Then it compares every file by its SHA-256, and measures both placements.

#![forbid(unsafe_code)]

use std::path::{Path, PathBuf};
use std::process::Child;
use std::time::{Duration, Instant};

use outboard_harness::node::{BenchResult, BenchSpec, Node, NodePlacement};
use outboard_harness::report::{Table, say};
use outboard_harness::tree;
use outboard_harness::{Result, ceiling};

/// Size of the large file in bytes: more than 1 GiB, and not a multiple of a block or a part.
const LARGE_FILE: u64 = (1 << 30) + 12_345;

fn main() -> Result<()> {
    let work = WorkDir::create()?;
    let source = std::env::args_os().nth(1).map_or_else(|| PathBuf::from("/usr/share"), PathBuf::from);
    let started = Instant::now();

    say(format!("== A node in dpu placement, 2 targets, in {}", work.path.display()));
    let node = Node::new(&work.path.join("node"))?;
    node.up(NodePlacement::Dpu, 2, "4GiB")?;
    node.run(&["status"])?;
    node.run(&["pool", "create", "demo"])?;

    say(format!("\n== The tree to copy: {} and a file of {LARGE_FILE} bytes", source.display()));
    let large = work.path.join("large.bin");
    tree::write_noise(&large, LARGE_FILE)?;
    let before = tree::read(&source)?;
    let (files, links, directories) = tree::count(&before);
    say(format!("   {files} files, {links} symlinks, {directories} directories"));

    say("\n== Copying the tree into the node, and killing the store meanwhile");
    let source_text = source.to_str().ok_or("the path of the tree is not UTF-8; choose another tree")?;
    let large_text = large
        .to_str()
        .ok_or("the path of the work directory is not UTF-8; set OUTBOARD_DEMO_DIR to another directory")?;
    let copy = node.start(&["cp", "-r", source_text, "outboard:demo/tree"])?;
    kill_during(&node, copy, "store", Duration::from_secs(2))?;
    node.run(&["cp", large_text, "outboard:demo/large.bin"])?;

    say("\n== Copying the tree out of the node, and killing the osd meanwhile");
    let out = work.path.join("out");
    let out_text = out
        .to_str()
        .ok_or("the path of the work directory is not UTF-8; set OUTBOARD_DEMO_DIR to another directory")?;
    let copy = node.start(&["cp", "-r", "outboard:demo/tree", out_text])?;
    kill_during(&node, copy, "osd", Duration::from_secs(1))?;
    let large_out = work.path.join("large.out");
    let large_out_text = large_out
        .to_str()
        .ok_or("the path of the work directory is not UTF-8; set OUTBOARD_DEMO_DIR to another directory")?;
    node.run(&["get", "demo/large.bin", large_out_text])?;

    say("\n== Comparing every file by SHA-256, every symlink and every mode");
    let differ = tree::differences(&before, &tree::read(&out)?);
    for name in differ.iter().take(20) {
        say(format!("   DIFFERS: {name}"));
    }
    if !differ.is_empty() || tree::sha256(&large)? != tree::sha256(&large_out)? {
        return Err(format!(
            "the copies differ from the originals: {} paths of the tree differ; if the number is 0, the large file differs",
            differ.len()
        )
        .into());
    }
    say(format!("   {} paths and the large file are identical", before.len()));
    node.run(&["status"])?;

    say(
        "\n== Both placements on the same targets (client, osd, store and emulated DMA share this machine's cores)",
    );
    compare_placements(&node)?;
    say(format!("\nthe demo took {:.0} s", started.elapsed().as_secs_f64()));
    Ok(())
}

/// Waits for the duration `after`, and kills the process with the role `role` by SIGKILL while the
/// copy runs. Then waits until the process is restarted and the copy has succeeded.
fn kill_during(node: &Node, mut copy: Child, role: &str, after: Duration) -> Result<()> {
    std::thread::sleep(after);
    if let Some(status) = copy.try_wait()? {
        return Err(format!(
            "the copy ended ({status}) before the {role} could be killed; run the demo with a larger tree"
        )
        .into());
    }
    let (old, new) = node.kill(role)?;
    say(format!("   killed the {role} (pid {old}) with SIGKILL; the supervisor restarted it (pid {new})"));
    let status = copy.wait()?;
    if status.success() { Ok(()) } else { Err(format!("the copy failed: {status}").into()) }
}

fn compare_placements(node: &Node) -> Result<()> {
    let workloads =
        [("write", "4MiB", 16), ("read", "4MiB", 16), ("write", "4KiB", 16), ("randread", "4KiB", 16)];
    let mut table = Table::new(&[
        "workload",
        "placement",
        "MB/s",
        "op/s",
        "mean µs",
        "p99 µs",
        "host CPU µs/op",
        "node CPU µs/op",
    ]);
    let mut results: Vec<(usize, NodePlacement, BenchResult)> = Vec::new();
    for placement in [NodePlacement::Dpu, NodePlacement::Host] {
        node.down()?;
        node.up(placement, 2, "4GiB")?;
        if placement == NodePlacement::Dpu {
            node.run(&["pool", "create", "bench"])?;
        }
        for (i, &(mode, object_size, in_flight)) in workloads.iter().enumerate() {
            results.push((
                i,
                placement,
                node.bench("bench", BenchSpec { mode, object_size, in_flight, seconds: 5 })?,
            ));
        }
    }
    results.sort_by_key(|(i, ..)| *i);
    for (i, placement, r) in &results {
        let (mode, size, _) = workloads[*i];
        if r.errors > 0 {
            return Err(format!("{mode} {size}: {} operations failed", r.errors).into());
        }
        let number = |v: f64| format!("{v:.0}");
        table.row(&[
            format!("{mode} {size}"),
            placement.name().to_owned(),
            number(r.mb_per_s),
            number(r.iops),
            number(r.latency_us.mean),
            number(r.latency_us.p99),
            r.host_cpu_us_per_op.map_or_else(|| "unknown".to_owned(), number),
            r.node_cpu_us_per_op.map_or_else(|| "unknown".to_owned(), number),
        ]);
    }
    table.print();
    say(format!(
        "  ceilings of this machine: one plain TCP connection over loopback {:.0} MB/s, memory copy {:.0} MB/s",
        ceiling::loopback(1)?.mb_per_s,
        ceiling::memcpy_mb_per_s()
    ));
    Ok(())
}

/// A directory for the demo, which is removed at the end. `OUTBOARD_DEMO_DIR` names its parent
/// directory. The demo needs about 13 GB of free space there.
struct WorkDir {
    path: PathBuf,
}

impl WorkDir {
    fn create() -> Result<WorkDir> {
        let parent = std::env::var_os("OUTBOARD_DEMO_DIR").map_or_else(std::env::temp_dir, PathBuf::from);
        let path = parent.join(format!("outboard-demo-{}", std::process::id()));
        std::fs::create_dir_all(&path).map_err(|e| {
            format!("cannot create {} ({e}); set OUTBOARD_DEMO_DIR to a writable directory", path.display())
        })?;
        Ok(WorkDir { path })
    }
}

impl Drop for WorkDir {
    fn drop(&mut self) {
        remove(&self.path);
    }
}

fn remove(path: &Path) {
    if let Err(e) = std::fs::remove_dir_all(path) {
        say(format!("cannot remove {} ({e}); remove it by hand", path.display()));
    }
}
