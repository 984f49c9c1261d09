//! The kernel that uses Intel's ISA-L, loaded at run time.
//!
//! The signatures and sizes come from `erasure_code.h`. They are the same in all libraries named
//! `libisal.so.2`. The content of the tables differs between versions and processors, so this
//! module does not interpret the tables.

use std::ffi::{CStr, c_int, c_void};
use std::sync::OnceLock;

use super::{Kernel, Transform, assert_shape};
use crate::geometry::MAX_FRAGMENTS;
use crate::matrix::Matrix;
use crate::{EcError, Result};

const SONAME: &CStr = c"libisal.so.2";
/// Table bytes per coefficient.
const TABLE: usize = 32;
/// Maximum vector length of a call, in bytes. The library takes lengths as `int`.
const LONGEST: usize = 1 << 30;

/// Functions of ISA-L.
#[derive(Debug, Clone, Copy)]
struct Isal {
    init_tables: unsafe extern "C" fn(k: c_int, rows: c_int, a: *const u8, tables: *mut u8),
    encode_data: unsafe extern "C" fn(
        len: c_int,
        k: c_int,
        rows: c_int,
        tables: *const u8,
        data: *const *const u8,
        coding: *const *mut u8,
    ),
    encode_data_update: unsafe extern "C" fn(
        len: c_int,
        k: c_int,
        rows: c_int,
        column: c_int,
        tables: *const u8,
        data: *const u8,
        coding: *const *mut u8,
    ),
}

static LIBRARY: OnceLock<Result<Isal>> = OnceLock::new();

/// Loads the library on the first call. The library stays loaded until the process ends.
pub(super) fn load() -> Result<&'static dyn Kernel> {
    match LIBRARY.get_or_init(open) {
        Ok(isal) => Ok(isal),
        Err(e) => Err(e.clone()),
    }
}

fn open() -> Result<Isal> {
    // SAFETY: the name is constant. The library's constructors only select functions for the
    // processor.
    let library = unsafe { libc::dlopen(SONAME.as_ptr(), libc::RTLD_NOW | libc::RTLD_LOCAL) };
    if library.is_null() {
        // SAFETY: the text of dlerror is valid until this thread calls a dl function again.
        let text = unsafe { libc::dlerror() };
        // SAFETY: dlopen has just failed, so dlerror returned a text.
        let why = unsafe { CStr::from_ptr(text) };
        return Err(EcError::NoIsal { why: why.to_string_lossy().into_owned() });
    }
    // SAFETY: each symbol has the name of the function with the signature given above.
    unsafe {
        Ok(Isal {
            init_tables: symbol(library, c"ec_init_tables")?,
            encode_data: symbol(library, c"ec_encode_data")?,
            encode_data_update: symbol(library, c"ec_encode_data_update")?,
        })
    }
}

/// Looks up a function of the library.
///
/// # Safety
/// `library` must be open, and `F` must be the type of a pointer to the function of that name.
unsafe fn symbol<F: Copy>(library: *mut c_void, name: &CStr) -> Result<F> {
    const { assert!(size_of::<F>() == size_of::<*mut c_void>()) };
    // SAFETY: the library is open, and the name is a terminated string.
    let address = unsafe { libc::dlsym(library, name.as_ptr()) };
    if address.is_null() {
        return Err(EcError::NoIsal { why: format!("the library has no function {name:?}") });
    }
    // SAFETY: the address is not null, has the size of `F`, and is of the type that the caller
    // promises.
    Ok(unsafe { std::mem::transmute_copy(&address) })
}

impl Kernel for Isal {
    fn name(&self) -> &'static str {
        "isal"
    }

    fn prepare(&self, matrix: &Matrix) -> Box<dyn Transform> {
        let (rows, columns) = (matrix.rows(), matrix.columns());
        assert!(
            rows <= MAX_FRAGMENTS && columns <= MAX_FRAGMENTS,
            "a matrix of {rows} x {columns} is larger than the matrix of any code"
        );
        let mut tables = vec![0; TABLE * rows * columns].into_boxed_slice();
        let coefficients = matrix.coefficients().as_ptr();
        // SAFETY: the call reads rows * columns coefficients, and writes 32 bytes for each.
        unsafe { (self.init_tables)(columns as c_int, rows as c_int, coefficients, tables.as_mut_ptr()) };
        Box::new(Tables { isal: *self, rows, columns, tables })
    }
}

/// A matrix in ISA-L's form: `tables` has 32 bytes for each coefficient. The matrix has at most
/// [`MAX_FRAGMENTS`] rows and columns.
#[derive(Debug)]
struct Tables {
    isal: Isal,
    rows: usize,
    columns: usize,
    tables: Box<[u8]>,
}

impl Transform for Tables {
    fn apply(&self, sources: &[&[u8]], outputs: &mut [&mut [u8]]) {
        let Some(len) = outputs.first().map(|out| out.len()) else { return };
        assert_shape(sources.iter().map(|s| s.len()), self.columns, len, "source");
        assert_shape(outputs.iter().map(|o| o.len()), self.rows, len, "output");
        let (k, rows) = (self.columns as c_int, self.rows as c_int);
        for at in (0..len).step_by(LONGEST) {
            let size = LONGEST.min(len - at);
            let mut data = [std::ptr::null(); MAX_FRAGMENTS];
            data.iter_mut().zip(sources).for_each(|(data, source)| *data = source[at..].as_ptr());
            let coding = pointers(outputs, at);
            // SAFETY: the call reads `columns` sources of `size` bytes, and writes `rows` outputs
            // of `size` bytes. No other code can access the outputs. The tables belong to that
            // matrix. The library keeps no pointers, and checks the processor's features.
            unsafe {
                (self.isal.encode_data)(
                    size as c_int,
                    k,
                    rows,
                    self.tables.as_ptr(),
                    data.as_ptr(),
                    coding.as_ptr(),
                );
            }
        }
    }

    fn accumulate(&self, column: usize, source: &[u8], outputs: &mut [&mut [u8]]) {
        assert!(column < self.columns, "the matrix has no column {column}");
        assert_shape(outputs.iter().map(|o| o.len()), self.rows, source.len(), "output");
        let (k, rows) = (self.columns as c_int, self.rows as c_int);
        for (index, part) in source.chunks(LONGEST).enumerate() {
            let coding = pointers(outputs, index * LONGEST);
            // SAFETY: the call reads one source, and updates `rows` outputs of its length. No other
            // code can access the outputs. The tables belong to a matrix that has this column.
            unsafe {
                (self.isal.encode_data_update)(
                    part.len() as c_int,
                    k,
                    rows,
                    column as c_int,
                    self.tables.as_ptr(),
                    part.as_ptr(),
                    coding.as_ptr(),
                );
            }
        }
    }
}

/// Returns pointers to the outputs from offset `at` on. There are at most [`MAX_FRAGMENTS`]
/// outputs.
fn pointers(outputs: &mut [&mut [u8]], at: usize) -> [*mut u8; MAX_FRAGMENTS] {
    let mut pointers = [std::ptr::null_mut(); MAX_FRAGMENTS];
    pointers.iter_mut().zip(outputs).for_each(|(pointer, out)| *pointer = out[at..].as_mut_ptr());
    pointers
}
