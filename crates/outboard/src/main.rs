//! The program `outboard`.

#![forbid(unsafe_code)]

use std::process::ExitCode;

/// Replaces the C library's allocator. Buffers are pooled, but each request also allocates small
/// values on one thread and frees them on another. The C library's allocator is slow in this case.
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

fn main() -> ExitCode {
    cli::main()
}
