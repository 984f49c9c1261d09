//! Tests of `outboard ec` as scripts use it: files, exit codes, damage and repair.

use std::fs;
use std::path::Path;
use std::process::{Command, Output, Stdio};

/// A temporary directory in which the tests run the program.
struct Dir(tempfile::TempDir);

impl Dir {
    fn new() -> Dir {
        Dir(tempfile::tempdir().unwrap())
    }

    fn path(&self) -> &Path {
        self.0.path()
    }

    fn run(&self, args: &[&str]) -> Output {
        let mut command = Command::new(env!("CARGO_BIN_EXE_outboard"));
        command.arg("ec").args(args).current_dir(self.path()).stdin(Stdio::null()).output().unwrap()
    }

    /// Runs a command that must succeed. Returns its standard output and standard error.
    fn ok(&self, args: &[&str]) -> (Vec<u8>, String) {
        let output = self.run(args);
        let stderr = String::from_utf8(output.stderr).unwrap();
        assert!(output.status.success(), "outboard ec {args:?}: {stderr}");
        (output.stdout, stderr)
    }

    fn json(&self, args: &[&str]) -> serde_json::Value {
        serde_json::from_slice(&self.ok(args).0).unwrap()
    }

    /// Runs a command that must fail with the exit status `status`. Returns its standard error.
    fn fails(&self, status: i32, args: &[&str]) -> String {
        let output = self.run(args);
        let stderr = String::from_utf8(output.stderr).unwrap();
        assert_eq!(output.status.code(), Some(status), "outboard ec {args:?}: {stderr}");
        assert!(output.stdout.is_empty(), "errors go to standard error");
        stderr
    }

    fn write(&self, name: &str, data: &[u8]) {
        fs::write(self.path().join(name), data).unwrap();
    }

    fn read(&self, name: &str) -> Vec<u8> {
        fs::read(self.path().join(name)).unwrap()
    }

    fn remove(&self, names: &[&str]) {
        names.iter().for_each(|name| fs::remove_file(self.path().join(name)).unwrap());
    }

    /// Returns the names of all files in the directory, including hidden files.
    fn names(&self) -> Vec<String> {
        let entries = fs::read_dir(self.path()).unwrap();
        let mut names: Vec<String> = entries.map(|e| e.unwrap().file_name().into_string().unwrap()).collect();
        names.sort();
        names
    }

    /// Flips a bit of the byte at offset `at`.
    fn flip(&self, name: &str, at: usize) {
        let mut data = self.read(name);
        data[at] ^= 0x10;
        self.write(name, &data);
    }
}

/// Returns pseudo-random bytes, which are the same in every call.
fn noise(len: usize) -> Vec<u8> {
    let mut x = 88_172_645_463_325_252_u64;
    let mut next = || {
        x ^= x << 13;
        x ^= x >> 7;
        x ^= x << 17;
        x as u8
    };
    (0..len).map(|_| next()).collect()
}

/// Arguments of a command that encodes with 4+2.
const CODE: [&str; 5] = ["encode", "--k", "4", "--m", "2"];

fn encode<'a>(more: &[&'a str]) -> Vec<&'a str> {
    [&CODE[..], more].concat()
}

#[test]
fn a_file_is_restored_from_k_fragments() {
    for kernel in ["auto", "portable"] {
        for len in [0, 1, 100_000, 3_000_001] {
            let dir = Dir::new();
            let data = noise(len);
            dir.write("file", &data);
            dir.ok(&encode(&["--kernel", kernel, "file"]));
            let fragments: Vec<String> = (0..6).map(|n| format!("file.{n:03}.fragment")).collect();
            assert_eq!(
                dir.names(),
                [&["file".to_owned()][..], &fragments[..]].concat(),
                "the directory contains nothing else"
            );

            dir.remove(&["file", "file.001.fragment", "file.005.fragment"]);
            let (_, notes) = dir.ok(&["decode", "--kernel", kernel, "file"]);
            assert_eq!(dir.read("file"), data);
            assert!(notes.contains("1, 5") && notes.contains("--repair"), "{notes}");
            assert_eq!(dir.names().len(), 5, "without --repair no fragment is recreated");
        }
    }
}

#[test]
fn fragments_with_names_of_older_versions_are_decoded() {
    let dir = Dir::new();
    let data = noise(100_000);
    dir.write("file", &data);
    dir.ok(&encode(&["file"]));
    for index in 0..6 {
        let name = format!("file.{index:03}.fragment");
        dir.write(&format!("file.{index:03}.shard"), &dir.read(&name));
        dir.remove(&[&name]);
    }
    dir.remove(&["file", "file.002.shard"]);
    dir.ok(&["decode", "file"]);
    assert_eq!(dir.read("file"), data);
}

#[test]
fn decoding_fails_if_one_fragment_too_many_is_lost() {
    let dir = Dir::new();
    dir.write("file", &noise(500_000));
    dir.ok(&encode(&["file"]));
    dir.remove(&["file", "file.000.fragment", "file.003.fragment", "file.004.fragment"]);
    let error = dir.fails(1, &["decode", "file"]);
    assert!(error.contains("of 6 fragments 3 are intact") && error.contains("at least 1"), "{error}");
    assert_eq!(dir.names().len(), 3, "no incomplete file is left behind");
}

#[test]
fn damaged_fragments_are_detected_and_repaired() {
    let dir = Dir::new();
    let data = noise(1_000_000);
    dir.write("file", &data);
    let report = dir.json(&encode(&["--unit", "16KiB", "--json", "file"]));
    assert_eq!((&report[0]["bytes"], &report[0]["unit"]), (&1_000_000.into(), &16_384.into()));
    let before: Vec<Vec<u8>> = (0..6).map(|n| dir.read(&format!("file.{n:03}.fragment"))).collect();

    dir.flip("file.002.fragment", 40_000);
    let (_, notes) = dir.ok(&["decode", "--out", "back", "file"]);
    assert_eq!(dir.read("back"), data);
    assert!(notes.contains("fragments 2 are missing or damaged"), "{notes}");

    // A decoding that needs no parity does not read a damaged parity fragment, but a repair reads
    // it. A damaged header makes the whole fragment unusable.
    dir.flip("file.002.fragment", 40_000);
    dir.flip("file.005.fragment", 40_000);
    assert_eq!(dir.ok(&["decode", "--force", "--out", "back", "file"]).1, "");
    dir.flip("file.000.fragment", 3);
    let report = dir.json(&["decode", "--repair", "--json", "--out", "/dev/null", "file"]);
    assert_eq!(report["lost"], serde_json::json!([0, 5]));
    assert_eq!(report["repaired"], serde_json::json!(["file.000.fragment", "file.005.fragment"]));
    for (n, before) in before.iter().enumerate() {
        assert!(dir.read(&format!("file.{n:03}.fragment")) == *before, "fragment {n}");
    }

    dir.remove(&["file.001.fragment", "file.004.fragment"]);
    dir.ok(&["decode", "--repair", "--force", "file"]);
    assert!(dir.read("file.001.fragment") == before[1] && dir.read("file.004.fragment") == before[4]);
    assert!(dir.read("file") == data);
}

#[test]
fn existing_files_are_overwritten_only_with_force() {
    let dir = Dir::new();
    dir.write("file", b"old");
    dir.ok(&encode(&["file"]));
    let (fragment, id) = (dir.read("file.003.fragment"), 32..48);
    assert!(dir.fails(1, &encode(&["file"])).contains("--force"));
    assert_eq!(dir.read("file.003.fragment"), fragment);
    dir.ok(&encode(&["--force", "file"]));
    assert_ne!(dir.read("file.003.fragment")[id.clone()], fragment[id], "each encoding has a new id");

    dir.write("file", b"new");
    assert!(dir.fails(1, &["decode", "file"]).contains("--force"));
    assert_eq!(dir.read("file"), b"new");
    dir.ok(&["decode", "--force", "file"]);
    assert_eq!(dir.read("file"), b"old");

    // A repair also does not replace an existing fragment that the command line does not name.
    let named = [
        "file.000.fragment",
        "file.001.fragment",
        "file.002.fragment",
        "file.003.fragment",
        "file.004.fragment",
    ];
    dir.flip("file.005.fragment", 0);
    let damaged = dir.read("file.005.fragment");
    let repair = ["decode", "--repair", "--out", "/dev/null"];
    assert!(dir.fails(1, &[&repair[..], &named].concat()).contains("file.005.fragment exists"));
    assert_eq!(dir.read("file.005.fragment"), damaged);
}

#[test]
fn fragments_may_lie_in_several_directories_and_input_and_output_may_be_pipes() {
    let dir = Dir::new();
    let data = noise(300_000);
    dir.write("file", &data);
    dir.write("other", b"x");
    dir.ok(&encode(&["--out", "a/b", "file", "other"]));
    fs::rename(dir.path().join("a/b/file.005.fragment"), dir.path().join("moved")).unwrap();
    dir.remove(&["a/b/file.000.fragment", "a/b/file.001.fragment"]);
    assert!(dir.fails(1, &["decode", "--out", "-", "a/b/file"]).contains("too much is lost"));
    let fragments = [
        "decode",
        "--out",
        "-",
        "moved",
        "a/b/file.002.fragment",
        "a/b/file.003.fragment",
        "a/b/file.004.fragment",
    ];
    assert_eq!(dir.ok(&fragments).0, data);

    let mut command = Command::new(env!("CARGO_BIN_EXE_outboard"));
    let encode = command.arg("ec").args(encode(&["--out", ".", "/dev/stdin"])).current_dir(dir.path());
    let mut encode = encode.stdin(Stdio::piped()).spawn().unwrap();
    std::io::Write::write_all(&mut encode.stdin.take().unwrap(), &data).unwrap();
    assert!(encode.wait().unwrap().success());
    assert_eq!(dir.ok(&["decode", "--out", "-", "stdin"]).0, data);
}

#[test]
fn errors_about_wrong_arguments_say_what_to_do() {
    let dir = Dir::new();
    dir.write("file", b"x");
    assert!(dir.fails(2, &["encode", "--k", "200", "--m", "100", "file"]).contains("255"));
    assert!(dir.fails(2, &["encode", "--k", "0", "--m", "1", "file"]).contains("at least one"));
    assert!(dir.fails(1, &encode(&["--unit", "100", "file"])).contains("multiple of 64"));
    assert!(dir.fails(2, &encode(&["--kernel", "fast", "file"])).contains("portable"));
    assert!(dir.fails(1, &encode(&["nowhere"])).contains("nowhere"));
    assert!(dir.fails(2, &encode(&["."])).contains("tar"));
    assert_eq!(dir.names(), ["file"], "failed commands leave no files behind");
    assert!(dir.fails(1, &["decode", "nowhere"]).contains("nowhere.NNN.fragment"));
    assert!(dir.fails(1, &["decode", "--out", "back", "file"]).contains("is a fragment"));
    assert!(dir.fails(2, &["decode", "file"]).contains("--out"));

    dir.ok(&encode(&["file"]));
    fs::create_dir(dir.path().join("again")).unwrap();
    dir.ok(&encode(&["--out", "again", "file"]));
    let mixed = dir.fails(1, &["decode", "--out", "back", "file.000.fragment", "again/file.001.fragment"]);
    assert!(mixed.contains("file.000.fragment and again/file.001.fragment"), "{mixed}");
    let twice = dir.fails(1, &["decode", "--out", "back", "file.000.fragment", "file.000.fragment"]);
    assert!(twice.contains("both fragment 0"), "{twice}");
}
