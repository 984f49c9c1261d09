//! Tests of loading libfabric. A process with several threads cannot change its environment, and so
//! cannot disable libfabric's cache. libfabric is not loaded while its cache is enabled.

use fabric::{FabricError, Library, ProviderQuery};

const CACHE: &str = "FI_MR_CACHE_MAX_COUNT";

#[test]
fn libfabric_is_not_loaded_while_its_registration_cache_is_enabled() {
    if std::env::var_os("OUTBOARD_TEST_ALONE").is_some() {
        Library::prepare();
        assert_eq!(std::env::var_os(CACHE), None, "a test is not the only thread of its process");
        assert!(matches!(Library::load(), Err(FabricError::CachesRegistrations)));
        return;
    }
    let status = std::process::Command::new(std::env::current_exe().unwrap())
        .args(["libfabric_is_not_loaded_while_its_registration_cache_is_enabled", "--exact"])
        .env("OUTBOARD_TEST_ALONE", "1")
        .env_remove(CACHE)
        .status()
        .unwrap();
    assert!(status.success());
    match Library::load() {
        Ok(_) | Err(FabricError::NotLoaded(_)) => {}
        Err(e) => {
            panic!("the library does not load, although cargo's configuration sets {CACHE} for tests: {e}")
        }
    }
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
    if let Ok(library) = Library::load() {
        let query = ProviderQuery { provider: Some("tcp".to_owned()), ..ProviderQuery::default() };
        assert!(!library.query(&query).unwrap().is_empty());
        assert_eq!(handled(), before);
    }
}
