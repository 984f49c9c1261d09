//! A process that has threads cannot change its environment any more, and libfabric is not loaded into it as it is.

use fabric::{FabricError, Library, ProviderQuery};

const CACHE: &str = "FI_MR_CACHE_MAX_COUNT";

#[test]
fn without_preparation_the_library_is_not_loaded() {
    if std::env::var_os("OUTBOARD_TEST_ALONE").is_some() {
        Library::prepare();
        assert_eq!(std::env::var_os(CACHE), None, "a test is not the only thread of its process");
        assert!(matches!(Library::load(), Err(FabricError::CachesRegistrations)));
        return;
    }
    let status = std::process::Command::new(std::env::current_exe().unwrap())
        .args(["without_preparation_the_library_is_not_loaded", "--exact"])
        .env("OUTBOARD_TEST_ALONE", "1")
        .env_remove(CACHE)
        .status()
        .unwrap();
    assert!(status.success());
    match Library::load() {
        Ok(_) | Err(FabricError::NotLoaded(_)) => {}
        Err(e) => panic!("cargo gives the environment of its configuration to tests: {e}"),
    }
}

/// What libfabric brings with it would exit the process on SIGTERM, with a backtrace.
#[test]
fn loading_the_library_leaves_signals_alone() {
    let handled = || {
        let status = std::fs::read_to_string("/proc/self/status").unwrap();
        status.lines().find(|line| line.starts_with("SigCgt:")).map(str::to_owned)
    };
    let before = handled();
    if let Ok(library) = Library::load() {
        let query = ProviderQuery { provider: Some("tcp".to_owned()), ..ProviderQuery::default() };
        assert!(!library.query(&query).unwrap().is_empty());
        assert_eq!(handled(), before);
    }
}
