//! Serves a disk in memory at a UNIX socket, for front ends such as QEMU.
//!
//!     cargo run --release -p outboard-vhost --example serve -- SOCKET [MIB] [null]
//!
//! With `null`, the disk stores nothing. Each line on the standard input is a new size of the disk in
//! MiB.

#![expect(clippy::print_stderr, reason = "an example for the command line")]

use std::io::BufRead;
use std::sync::Arc;

use disk::{Disk, MemDisk, NullDisk};
use tokio::net::UnixListener;
use vhost::{DeviceOptions, direct};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let mut arguments = std::env::args().skip(1);
    let socket = arguments.next().ok_or("usage: serve SOCKET [MIB] [null]")?;
    let size = arguments.next().map_or(Ok(1024), |mib| mib.parse::<u64>())? << 20;
    let is_null = arguments.next().as_deref() == Some("null");
    let memory = Arc::new(MemDisk::new(size));
    let disk: Arc<dyn Disk> = if is_null { Arc::new(NullDisk::new(size)) } else { Arc::clone(&memory) as _ };
    std::thread::spawn(move || {
        for line in std::io::stdin().lock().lines().map_while(Result::ok) {
            if let Ok(mib) = line.trim().parse::<u64>() {
                memory.resize(mib << 20);
            }
        }
    });
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    runtime.block_on(async {
        let _ = std::fs::remove_file(&socket);
        let listener = UnixListener::bind(&socket)?;
        loop {
            let (stream, _) = listener.accept().await?;
            let disk = Arc::clone(&disk);
            tokio::spawn(async move {
                let ended = direct::serve(stream, disk, &DeviceOptions::default()).await;
                eprintln!("a front end has left: {ended:?}");
            });
        }
    })
}
