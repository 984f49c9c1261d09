//! Opening `libfabric.so.1`.

use std::ffi::{CStr, CString, c_char, c_int, c_void};
use std::sync::OnceLock;

use super::abi::{API_VERSION, FabricAttr, FiInfo, FidFabric};
use crate::{FabricError, Result};

const SONAME: &CStr = c"libfabric.so.1";
/// Most registrations in libfabric's cache. With a cache, memory stays accessible to peers after its region was closed.
const CACHE: &str = "FI_MR_CACHE_MAX_COUNT";

/// What is called by name; everything else is reached through objects.
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
    /// this first in `main`. The function sets `FI_MR_CACHE_MAX_COUNT=0` in the environment, from
    /// which libfabric reads it. The environment can only be changed while the process has no other
    /// thread. If another thread exists, this does nothing.
    pub fn prepare() {
        if !cache_is_off() && is_only_thread() {
            // SAFETY: no other thread reads the environment, or could begin to: there is none.
            unsafe { std::env::set_var(CACHE, "0") };
        }
    }

    /// Opens the library. Only the first call has an effect.
    ///
    /// # Errors
    /// [`FabricError::NotLoaded`] if the library cannot be opened.
    /// [`FabricError::CachesRegistrations`] if the cache is not disabled, neither by
    /// [`prepare`](Self::prepare) nor by the inherited environment.
    pub fn load() -> Result<Library> {
        SYMBOLS.get_or_init(open).as_ref().map(|_| Library(())).map_err(Clone::clone)
    }

    /// Version of the library, as major and minor number.
    #[must_use]
    pub fn version(self) -> (u16, u16) {
        // SAFETY: takes nothing and cannot fail.
        let version = unsafe { (symbols().version)() };
        ((version >> 16) as u16, version as u16)
    }
}

fn cache_is_off() -> bool {
    std::env::var_os(CACHE).is_some_and(|most| most == "0")
}

/// Whether this process has no thread but the one that asks. Also no if that cannot be found out.
fn is_only_thread() -> bool {
    std::fs::read_dir("/proc/self/task").is_ok_and(|threads| threads.count() == 1)
}

fn open() -> Result<Symbols> {
    Library::prepare();
    if !cache_is_off() {
        return Err(FabricError::CachesRegistrations);
    }
    let _handlers = SignalHandlers::keep();
    // SAFETY: a constant name; constructors of the library and of what it needs set up their own state, and perhaps signal
    // handlers, which are put back.
    let library = unsafe { libc::dlopen(SONAME.as_ptr(), libc::RTLD_NOW | libc::RTLD_LOCAL) };
    if library.is_null() {
        // SAFETY: dlerror's text is valid until this thread's next call of its kind.
        let text = unsafe { libc::dlerror() };
        // SAFETY: dlopen has just failed, so there is a text.
        let why = unsafe { CStr::from_ptr(text) };
        return Err(FabricError::NotLoaded(why.to_string_lossy().into_owned()));
    }
    // SAFETY: each symbol is asked for by name and by the version that has the signature given above.
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
    // SAFETY: takes nothing and cannot fail.
    let version = unsafe { (symbols.version)() };
    if version < API_VERSION {
        let what = format!("it is version {}.{}", version >> 16, version & 0xffff);
        return Err(FabricError::NotLoaded(what));
    }
    Ok(symbols)
}

/// How signals are handled: put back when dropped. Debian's libfabric brings libinfinipath, which at its start takes over
/// SIGINT, SIGTERM and others, to print a backtrace and exit.
struct SignalHandlers(Vec<(c_int, libc::sigaction)>);

impl SignalHandlers {
    fn keep() -> SignalHandlers {
        let handlers = (1..32).filter_map(|signal| {
            // SAFETY: all zeros are a valid sigaction; nothing is changed, and what is there is written to a place for it.
            let mut handler: libc::sigaction = unsafe { std::mem::zeroed() };
            // SAFETY: as above.
            let code = unsafe { libc::sigaction(signal, std::ptr::null(), &raw mut handler) };
            (code == 0).then_some((signal, handler))
        });
        SignalHandlers(handlers.collect())
    }
}

impl Drop for SignalHandlers {
    fn drop(&mut self) {
        for (signal, handler) in &self.0 {
            // SAFETY: a handler that was there before. An error says that the signal cannot be handled at all.
            unsafe { libc::sigaction(*signal, handler, std::ptr::null_mut()) };
        }
    }
}

/// A function of the library.
///
/// # Safety
/// `library` must be open, and `F` the type of a pointer to the function of that name and version.
unsafe fn symbol<F: Copy>(library: *mut c_void, name: &CStr, version: &CStr) -> Result<F> {
    const { assert!(size_of::<F>() == size_of::<*mut c_void>()) };
    // SAFETY: an open library and two terminated strings.
    let address = unsafe { libc::dlvsym(library, name.as_ptr(), version.as_ptr()) };
    if address.is_null() {
        return Err(FabricError::NotLoaded(format!("it has no {name:?} of version {version:?}")));
    }
    // SAFETY: not null, of the same size, and of the type that the caller promises.
    Ok(unsafe { std::mem::transmute_copy(&address) })
}

/// # Panics
/// If the library is not open; whoever holds an object of it knows that it is.
fn symbols() -> &'static Symbols {
    SYMBOLS.get().and_then(|s| s.as_ref().ok()).expect("the library is open")
}

/// The error of a call that failed with the positive number `code`.
pub(super) fn error(call: &'static str, code: i32) -> FabricError {
    // SAFETY: takes any number and gives a constant string.
    let text = unsafe { CStr::from_ptr((symbols().strerror)(code)) };
    FabricError::Call { call, code, text: text.to_string_lossy().into_owned(), advice: advice(call, code) }
}

fn advice(call: &str, code: i32) -> &'static str {
    match (call, code) {
        ("fi_mr_reg", libc::ENOMEM | libc::EPERM | libc::EAGAIN) => {
            "; raise the limit of locked memory (ulimit -l) or lower the configured buffer sizes"
        }
        (_, libc::ECONNREFUSED) => "; is the peer listening there, and does it want this peer?",
        ("fi_listen", libc::EADDRINUSE) => "; choose another port",
        (_, libc::EADDRINUSE) => "; connect again: it will be from another port",
        (_, libc::EADDRNOTAVAIL | libc::ENODEV) => "; choose an address that this machine has",
        _ => "",
    }
}

/// Makes an error of what libfabric returned, if it is one.
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
    // The first call sets up all providers.
    static FIRST: std::sync::Once = std::sync::Once::new();
    let mut handlers = None;
    FIRST.call_once(|| handlers = Some(SignalHandlers::keep()));
    let mut list = std::ptr::null_mut();
    // SAFETY: terminated strings or null, hints as promised, and a place for the result.
    let code = unsafe {
        (symbols().getinfo)(API_VERSION, pointer(node), pointer(service), flags, hints, &raw mut list)
    };
    if code == 0 { Ok(list) } else { Err(-code) }
}

/// # Safety
/// `info` must come from libfabric, and nobody may use it afterwards.
pub(super) unsafe fn freeinfo(info: *mut FiInfo) {
    // SAFETY: the caller's promise.
    unsafe { (symbols().freeinfo)(info) };
}

/// A copy of `info` without what follows it; an empty one of null; null if there is no memory.
///
/// # Safety
/// `info` must be null or come from libfabric.
pub(super) unsafe fn dupinfo(info: *const FiInfo) -> *mut FiInfo {
    // SAFETY: the caller's promise.
    unsafe { (symbols().dupinfo)(info) }
}

/// # Safety
/// `attr` must come from libfabric.
pub(super) unsafe fn fabric(attr: *mut FabricAttr) -> Result<*mut FidFabric> {
    let mut fabric = std::ptr::null_mut();
    // SAFETY: the caller's promise, and a place for the result.
    check("fi_fabric", unsafe { (symbols().fabric)(attr, &raw mut fabric, std::ptr::null_mut()) })?;
    Ok(fabric)
}

/// A C string of text that has no zero byte.
pub(super) fn c_string(text: &str) -> Result<CString> {
    CString::new(text).map_err(|_| FabricError::NoProvider { wanted: format!("named {text:?}") })
}
