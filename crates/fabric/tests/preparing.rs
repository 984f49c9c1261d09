//! Tests of loading libfabric. A process with several threads cannot change its environment, and so
//! cannot disable libfabric's cache. libfabric is not loaded while its cache is enabled.

use fabric::{FabricError, Library, ProviderQuery};

const CACHE: &str = "FI_MR_CACHE_MAX_COUNT";

/// Loads libfabric, whose cache cargo's configuration disables for tests.
fn library() -> Library {
    Library::load().unwrap_or_else(|e| panic!("libfabric cannot be loaded: {e}; run \"scripts/setup test\""))
}

#[test]
fn libfabric_is_not_loaded_while_its_registration_cache_is_enabled() {
    let child = std::process::Command::new(std::env::current_exe().unwrap())
        .args(["--ignored", "--exact", "child_process_with_a_registration_cache"])
        .env_remove(CACHE)
        .output()
        .unwrap();
    let said = String::from_utf8_lossy(&child.stdout);
    assert!(child.status.success() && said.contains("1 passed"), "{said}");
    library();
}

/// Not a test: the child process of
/// [`libfabric_is_not_loaded_while_its_registration_cache_is_enabled`].
#[test]
#[ignore = "runs as a child process of another test"]
fn child_process_with_a_registration_cache() {
    Library::prepare();
    assert_eq!(std::env::var_os(CACHE), None, "a test is not the only thread of its process");
    assert!(matches!(Library::load(), Err(FabricError::CachesRegistrations)));
}

/// A library that libfabric loads installs signal handlers. On SIGTERM, these handlers would print
/// a backtrace and exit the process.
#[test]
fn loading_libfabric_keeps_the_signal_handlers_of_the_process() {
    let handled = || {
        let status = std::fs::read_to_string("/proc/self/status").unwrap();
        status.lines().find(|line| line.starts_with("SigCgt:")).map(str::to_owned)
    };
    let before = handled();
    let query = ProviderQuery { provider: Some("tcp".to_owned()), ..ProviderQuery::default() };
    assert!(!library().query(&query).unwrap().is_empty());
    assert_eq!(handled(), before);
}
