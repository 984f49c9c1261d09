//! Checks that the generated code is current.

use std::path::Path;

use prost_types::FileDescriptorSet;

/// Generates the code into `dir`.
fn generate(dir: &Path) {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("proto");
    let descriptors: FileDescriptorSet =
        protox::compile([root.join("outboard/control/v1/control.proto")], [&root])
            .expect("a valid proto file");
    let bytes = prost::Message::encode_to_vec(&descriptors);
    std::fs::write(dir.join("control.fds"), bytes).expect("written");
    tonic_prost_build::configure().out_dir(dir).compile_fds(descriptors).expect("generated");
}

#[test]
fn the_generated_code_is_current() {
    let kept = Path::new(env!("CARGO_MANIFEST_DIR")).join("src/generated");
    if std::env::var_os("UPDATE_GENERATED").is_some() {
        return generate(&kept);
    }
    let dir = tempfile::tempdir().expect("a directory");
    generate(dir.path());
    for name in ["outboard.control.v1.rs", "control.fds"] {
        let [now, kept] = [dir.path(), &kept].map(|dir| std::fs::read(dir.join(name)).expect("a file"));
        assert!(now == kept, "{name} is not current; run UPDATE_GENERATED=1 cargo test -p outboard-control");
    }
}
