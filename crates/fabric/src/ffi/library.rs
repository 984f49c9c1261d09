//! Opening `libfabric.so.1`.

use std::ffi::{CStr, CString, c_char, c_int, c_void};
use std::sync::OnceLock;

use super::abi::{API_VERSION, FabricAttr, FiInfo, FidFabric};
use crate::{FabricError, Result};

const SONAME: &CStr = c"libfabric.so.1";
/// The environment variable that limits the number of registrations in libfabric's cache. With a
/// cache, peers could access memory even after its region was closed.
const CACHE: &str = "FI_MR_CACHE_MAX_COUNT";

/// The functions that are called by name. All other functions are called through the function
/// tables of libfabric's objects.
struct Symbols {
    getinfo: unsafe extern "C" fn(
        u32,
        *const c_char,
        *const c_char,
        u64,
        *const FiInfo,
        *mut *mut FiInfo,
    ) -> c_int,
    freeinfo: unsafe extern "C" fn(*mut FiInfo),
    dupinfo: unsafe extern "C" fn(*const FiInfo) -> *mut FiInfo,
    fabric: unsafe extern "C" fn(*mut FabricAttr, *mut *mut FidFabric, *mut c_void) -> c_int,
    strerror: unsafe extern "C" fn(c_int) -> *const c_char,
    version: unsafe extern "C" fn() -> u32,
}

static SYMBOLS: OnceLock<Result<Symbols>> = OnceLock::new();

/// The opened libfabric library. It stays open until the process ends.
#[derive(Debug, Clone, Copy)]
pub struct Library(());

impl Library {
    /// Disables libfabric's registration cache. A program that may load the library later must call
    /// this first in `main`. The function sets the environment variable `FI_MR_CACHE_MAX_COUNT` to
    /// 0, which libfabric reads. The environment may change only while the process has no other
    /// thread. If another thread exists, this function does nothing.
    pub fn prepare() {
        if !cache_is_off() && is_only_thread() {
            // SAFETY: the process has no other thread that could read the environment.
            unsafe { std::env::set_var(CACHE, "0") };
        }
    }

    /// Opens the library. Only the first call has an effect.
    ///
    /// # Errors
    /// [`FabricError::NotLoaded`] if the library cannot be opened.
    /// [`FabricError::CachesRegistrations`] if neither [`prepare`](Self::prepare) nor the inherited
    /// environment has disabled the cache.
    pub fn load() -> Result<Library> {
        SYMBOLS.get_or_init(open).as_ref().map(|_| Library(())).map_err(Clone::clone)
    }

    /// Version of the library, as major and minor number.
    #[must_use]
    pub fn version(self) -> (u16, u16) {
        // SAFETY: the function needs no argument and cannot fail.
        let version = unsafe { (symbols().version)() };
        ((version >> 16) as u16, version as u16)
    }
}

fn cache_is_off() -> bool {
    std::env::var_os(CACHE).is_some_and(|most| most == "0")
}

/// Whether the calling thread is the only thread of this process. Returns false if the threads
/// cannot be listed.
fn is_only_thread() -> bool {
    std::fs::read_dir("/proc/self/task").is_ok_and(|threads| threads.count() == 1)
}

fn open() -> Result<Symbols> {
    Library::prepare();
    if !cache_is_off() {
        return Err(FabricError::CachesRegistrations);
    }
    let _handlers = SignalHandlers::keep();
    // SAFETY: the name is constant. Constructors of the library and its dependencies set up only
    // their own state, and perhaps signal handlers, which are restored.
    let library = unsafe { libc::dlopen(SONAME.as_ptr(), libc::RTLD_NOW | libc::RTLD_LOCAL) };
    if library.is_null() {
        // SAFETY: the text is valid until this thread's next call of a `dl` function.
        let text = unsafe { libc::dlerror() };
        // SAFETY: dlopen has just failed, so the text is not null.
        let why = unsafe { CStr::from_ptr(text) };
        return Err(FabricError::NotLoaded(why.to_string_lossy().into_owned()));
    }
    // SAFETY: each symbol is looked up by its name and by the version that has the signature given
    // above.
    let symbols = unsafe {
        Symbols {
            getinfo: symbol(library, c"fi_getinfo", c"FABRIC_1.3")?,
            freeinfo: symbol(library, c"fi_freeinfo", c"FABRIC_1.3")?,
            dupinfo: symbol(library, c"fi_dupinfo", c"FABRIC_1.3")?,
            fabric: symbol(library, c"fi_fabric", c"FABRIC_1.1")?,
            strerror: symbol(library, c"fi_strerror", c"FABRIC_1.0")?,
            version: symbol(library, c"fi_version", c"FABRIC_1.0")?,
        }
    };
    // SAFETY: the function needs no argument and cannot fail.
    let version = unsafe { (symbols.version)() };
    if version < API_VERSION {
        let what = format!("the library has version {}.{}", version >> 16, version & 0xffff);
        return Err(FabricError::NotLoaded(what));
    }
    Ok(symbols)
}

/// The signal handlers of the process, which are restored when this value is dropped. Debian's
/// libfabric loads libinfinipath, which installs its own handlers for SIGINT, SIGTERM and others at
/// its start. These handlers print a backtrace and exit.
struct SignalHandlers(Vec<(c_int, libc::sigaction)>);

impl SignalHandlers {
    fn keep() -> SignalHandlers {
        let handlers = (1..32).filter_map(|signal| {
            // SAFETY: a `sigaction` of zeros is valid.
            let mut handler: libc::sigaction = unsafe { std::mem::zeroed() };
            // SAFETY: the call changes no handler, and writes the current one to `handler`.
            let code = unsafe { libc::sigaction(signal, std::ptr::null(), &raw mut handler) };
            (code == 0).then_some((signal, handler))
        });
        SignalHandlers(handlers.collect())
    }
}

impl Drop for SignalHandlers {
    fn drop(&mut self) {
        for (signal, handler) in &self.0 {
            // SAFETY: the handler was installed before. An error means that the signal cannot be
            // handled at all, and is ignored.
            unsafe { libc::sigaction(*signal, handler, std::ptr::null_mut()) };
        }
    }
}

/// Looks up a function of the library.
///
/// # Safety
/// `library` must be open, and `F` must be the pointer type of the function with this name and
/// version.
unsafe fn symbol<F: Copy>(library: *mut c_void, name: &CStr, version: &CStr) -> Result<F> {
    const { assert!(size_of::<F>() == size_of::<*mut c_void>()) };
    // SAFETY: the library is open, and both strings are terminated.
    let address = unsafe { libc::dlvsym(library, name.as_ptr(), version.as_ptr()) };
    if address.is_null() {
        return Err(FabricError::NotLoaded(format!(
            "the library has no function {name:?} of version {version:?}"
        )));
    }
    // SAFETY: the address is not null, has the size of `F`, and has the type that the caller
    // guarantees.
    Ok(unsafe { std::mem::transmute_copy(&address) })
}

/// Returns the functions of the opened library.
///
/// # Panics
/// If the library is not open. The library is open if any object of it exists.
fn symbols() -> &'static Symbols {
    SYMBOLS.get().and_then(|s| s.as_ref().ok()).expect("the library is open")
}

/// Returns the error of a call that failed with the positive error number `code`.
pub(super) fn error(call: &'static str, code: i32) -> FabricError {
    // SAFETY: the function accepts any number and returns a constant string.
    let text = unsafe { CStr::from_ptr((symbols().strerror)(code)) };
    FabricError::Call { call, code, text: text.to_string_lossy().into_owned(), advice: advice(call, code) }
}

fn advice(call: &str, code: i32) -> &'static str {
    match (call, code) {
        ("fi_mr_reg", libc::ENOMEM | libc::EPERM | libc::EAGAIN) => {
            "; raise the limit of locked memory (ulimit -l) or lower the configured buffer sizes"
        }
        (_, libc::ECONNREFUSED) => "; check that the peer listens at this address and accepts this client",
        ("fi_listen", libc::EADDRINUSE) => "; choose another port",
        (_, libc::EADDRINUSE) => "; connect again, which uses another local port",
        (_, libc::EADDRNOTAVAIL | libc::ENODEV) => "; choose an address that this machine has",
        _ => "",
    }
}

/// Returns an error if `code`, which a libfabric call returned, is not 0.
pub(super) fn check(call: &'static str, code: c_int) -> Result<()> {
    if code == 0 { Ok(()) } else { Err(error(call, -code)) }
}

/// # Safety
/// `hints` must be null or come from libfabric.
pub(super) unsafe fn getinfo(
    node: Option<&CStr>,
    service: Option<&CStr>,
    flags: u64,
    hints: *const FiInfo,
) -> Result<*mut FiInfo, c_int> {
    let pointer = |s: Option<&CStr>| s.map_or(std::ptr::null(), CStr::as_ptr);
    // The first call of `fi_getinfo` initialises all providers, which may change signal handlers.
    static FIRST: std::sync::Once = std::sync::Once::new();
    let mut handlers = None;
    FIRST.call_once(|| handlers = Some(SignalHandlers::keep()));
    let mut list = std::ptr::null_mut();
    // SAFETY: the strings are terminated or null, the caller guarantees that `hints` is valid, and
    // `list` has room for the result.
    let code = unsafe {
        (symbols().getinfo)(API_VERSION, pointer(node), pointer(service), flags, hints, &raw mut list)
    };
    if code == 0 { Ok(list) } else { Err(-code) }
}

/// # Safety
/// `info` must come from libfabric, and must not be used afterwards.
pub(super) unsafe fn freeinfo(info: *mut FiInfo) {
    // SAFETY: as the caller promises.
    unsafe { (symbols().freeinfo)(info) };
}

/// Returns a copy of `info` without the infos that follow it in a list. If `info` is null, returns
/// an empty info. Returns null if memory is exhausted.
///
/// # Safety
/// `info` must be null or come from libfabric.
pub(super) unsafe fn dupinfo(info: *const FiInfo) -> *mut FiInfo {
    // SAFETY: as the caller promises.
    unsafe { (symbols().dupinfo)(info) }
}

/// # Safety
/// `attr` must come from libfabric.
pub(super) unsafe fn fabric(attr: *mut FabricAttr) -> Result<*mut FidFabric> {
    let mut fabric = std::ptr::null_mut();
    // SAFETY: as the caller promises; `fabric` has room for the result.
    check("fi_fabric", unsafe { (symbols().fabric)(attr, &raw mut fabric, std::ptr::null_mut()) })?;
    Ok(fabric)
}

/// Converts `text` to a C string. Fails if `text` contains a zero byte.
pub(super) fn c_string(text: &str) -> Result<CString> {
    CString::new(text)
        .map_err(|_| FabricError::NoProvider { wanted: format!("through a provider named {text:?}") })
}
