//! Tests of `outboard-layers`: each command prints its results.

use std::process::{Command, Output};

use serde_json::Value;

fn run(args: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_outboard-layers")).args(args).output().unwrap()
}

/// Runs a command that must succeed; returns its standard output.
fn ok(args: &[&str]) -> String {
    let output = run(args);
    assert!(output.status.success(), "{args:?}: {}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).unwrap()
}

fn json(args: &[&str]) -> Value {
    serde_json::from_str(&ok(args)).unwrap()
}

#[test]
fn invalid_arguments_end_the_program_with_exit_status_2() {
    for args in
        [&["ec", "--unit", "100"][..], &["rpc", "--size", "0"], &["rpc", "--stack", "auto"], &["dma", "x"]]
    {
        let output = run(args);
        assert_eq!(output.status.code(), Some(2), "{args:?}: {}", String::from_utf8_lossy(&output.stderr));
        assert!(output.stdout.is_empty() || args[0] == "dma", "{args:?}");
    }
}

#[test]
fn the_rpc_command_measures_every_mode_between_two_processes() {
    for mode in ["echo", "one-way", "bulk-read", "bulk-write"] {
        let report = json(&["rpc", "--mode", mode, "--seconds", "1", "--rounds", "1", "--json"]);
        let contenders = report["contenders"].as_array().unwrap();
        assert!(!contenders.is_empty(), "{report}");
        assert!(contenders.iter().all(|c| c["operations_per_second"].as_f64().unwrap() > 0.0), "{report}");
    }
}

#[test]
fn the_connections_command_compares_many_connections_with_one() {
    let report = json(&["connections", "--connections", "4", "--seconds", "0.2", "--rounds", "1", "--json"]);
    let cases = report["cases"].as_array().unwrap();
    let shapes: Vec<(&str, u64)> = cases
        .iter()
        .map(|c| (c["contender"].as_str().unwrap(), c["shape"]["connections"].as_u64().unwrap()))
        .collect();
    let contenders = ["osd", "messenger", "bare_epoll"];
    let expected: Vec<(&str, u64)> = contenders.iter().flat_map(|name| [(*name, 1), (*name, 4)]).collect();
    assert_eq!(shapes, expected);
    assert!(cases.iter().all(|c| c["server_us_per_operation"].as_f64().unwrap() > 0.0), "{report}");
    assert!(report["ratios"].as_array().unwrap().iter().all(|r| r["server"].as_f64().unwrap() > 0.0));
}

#[test]
fn the_store_command_measures_a_target_file_and_its_mount() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("target");
    let second = dir.path().join("second");
    let (file, second) = (file.to_str().unwrap(), second.to_str().unwrap());
    for files in [vec![file], vec![file, second]] {
        let text = ok(&[&["store"], &files[..], &["--size", "512MiB", "--seconds", "0.2"]].concat());
        assert_eq!(text.matches(" op/s ").count(), 12, "{text}");
        assert!(text.lines().last().unwrap().starts_with("mount: "), "{text}");
    }
}

#[test]
fn the_osd_command_prints_a_line_for_every_load() {
    let text = ok(&["osd", "--seconds", "0.2"]);
    assert_eq!(text.lines().count(), 6, "{text}");
}

#[test]
fn the_channel_command_measures_dma_and_socket_for_each_store() {
    let text = ok(&["channel", "--seconds", "0.1", "--in-flight", "2"]);
    assert_eq!(text.lines().count(), 2 + 5 * 7 + 1, "{text}");
    let by_dma = text.lines().find(|line| line.starts_with("mem, dma: write 4 MiB")).unwrap();
    assert_ne!(by_dma.rsplit(' ').next(), Some("0.00"), "large writes use the DMA engine: {text}");
}

#[test]
fn the_dma_command_measures_the_emulated_engine_and_libfabric() {
    let output = run(&["dma"]);
    let (text, notes) =
        (String::from_utf8(output.stdout).unwrap(), String::from_utf8(output.stderr).unwrap());
    let engines: Vec<Value> = text.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    let names: Vec<&str> = engines.iter().map(|e| e["engine"].as_str().unwrap()).collect();
    if notes.contains("libfabric") {
        assert_eq!(names, ["shm"], "{notes}");
    } else {
        assert_eq!(names, ["shm", "ofi:tcp"], "{notes}");
    }
    assert!(engines.iter().all(|e| e["ping_us"].as_f64().unwrap() > 0.0), "{text}");
}

#[test]
fn the_ec_command_reports_every_code_place_and_size() {
    let report = json(&["ec", "--k", "4", "--m", "2", "--rounds", "1", "--sizes", "1MiB,3MB", "--json"]);
    let places = report["coding"].as_array().unwrap();
    assert_eq!(
        places.iter().map(|p| p["data_in"].as_str().unwrap()).collect::<Vec<_>>(),
        ["cache", "memory"]
    );
    for coding in places {
        let path = &coding["write_path"];
        assert!(path.as_array().unwrap().iter().any(|p| p["kernel"] == "portable"));
        assert!(
            path[0]["gb_per_s"].as_f64().unwrap() > 0.0 && coding["decode_gb_per_s"].as_f64().unwrap() > 0.0
        );
        assert_eq!(path[0]["ratio"].is_number(), report["isal"] == true);
    }
    // Two sizes of objects, each with data in the cache and with data in memory.
    let write = report["write"].as_array().unwrap();
    assert_eq!(write.iter().filter(|w| w["gb_per_s"].as_f64().unwrap() > 0.0).count(), 4);
    assert_eq!(
        (&write[0]["object_bytes"], &write[3]["object_bytes"]),
        (&(2 << 20).into(), &(4 << 20).into())
    );
    let experiment = &report["experiment"];
    let rows = experiment["rows"].as_array().unwrap();
    let of = |row: &serde_json::Value| {
        (row["place"].as_str().unwrap().to_owned(), row["encoded_bytes"].as_u64().unwrap())
    };
    let places = ["host", "dpu (emulated)", "accelerator (emulated)"];
    // Each file is padded so that each of the 128 fragments consists of whole blocks.
    let expected = [1 << 20, 128 * 24_576].map(|bytes| places.map(|place| (place.to_owned(), bytes)));
    assert_eq!(rows.iter().map(of).collect::<Vec<_>>(), expected.concat());
    for (row, place) in rows.iter().zip(places.iter().cycle()) {
        let number = |field: &str| row[field].as_f64().unwrap();
        assert_eq!(row["emulated"], *place != "host");
        assert!(number("seconds") > 0.0 && number("ratio_to_host") > 0.0, "{row}");
        let cpu = ["host", "dpu", "emulated_device"].map(|of| number(&format!("{of}_cpu_seconds")));
        let works = places.iter().position(|p| p == place).unwrap();
        assert!(cpu[works] > 0.0, "{row}");
        // A waiting thread uses almost no CPU time, except for its start in the rows of the first
        // size.
        let is_first = row["file_bytes"] == 1 << 20;
        assert!(is_first || (1..3).all(|other| other == works || cpu[other] < cpu[works]), "{row}");
    }
    let batching = &experiment["batching"];
    assert_eq!((&batching["files"], &batching["file_bytes"]), (&16.into(), &(1 << 20).into()));
    let [one, together] =
        ["one_by_one", "together"].map(|how| batching[format!("seconds_{how}")].as_f64().unwrap());
    assert!(together < one, "a batch has the fixed cost of one job: {batching}");
}

#[test]
fn the_ec_command_prints_the_ratio_of_the_paper_for_the_accelerator() {
    let args = ["ec", "--k", "2", "--m", "1", "--rounds", "1", "--sizes", "8MiB"];
    let text = ok(&args);
    let row = text.lines().find(|line| line.starts_with("accelerator (emulated)  ")).unwrap();
    assert!(row.split_whitespace().any(|field| field == "13.3"), "{row}");
    assert!(text.contains("16 files of 8388608 bytes submitted together"), "{text}");
}

#[test]
fn the_shards_command_compares_osds_with_different_numbers_of_shards() {
    let text = ok(&["shards", "--shards", "1,3", "--clients", "1", "--rounds", "1", "--seconds", "0.2"]);
    for (line, shards) in text.lines().skip(2).zip(["1", "3"]) {
        let fields: Vec<&str> = line.split_whitespace().collect();
        assert_eq!(fields[0], shards, "{text}");
        assert!(fields[1].parse::<f64>().unwrap() > 0.0, "{text}");
        let messages: f64 = fields.last().unwrap().parse().unwrap();
        assert!(messages <= 0.1, "the data path sends no messages between shards: {text}");
    }
    assert_eq!(text.lines().count(), 4, "{text}");
}
