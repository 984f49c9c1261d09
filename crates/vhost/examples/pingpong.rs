//! Compares the round trip of a request at queue depth 1 with a bare ping-pong of events.
//!
//!     cargo run --release -p outboard-vhost --example pingpong -- [POLL_MICROSECONDS [ROUNDS]]
//!
//! A front end in one thread sends reads to a null disk, which a device in another thread serves. In
//! the bare ping-pong, the same threads answer each other by two eventfds, with blocking reads. The
//! two kinds take turns. Each thread is bound to a CPU of its own if there are two. The program prints
//! the median of each kind and their ratio.

#![expect(clippy::print_stdout, reason = "a measuring program")]

#[path = "../tests/e2e/front_end.rs"]
mod front_end;
#[path = "../tests/e2e/guest.rs"]
mod guest;

use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::time::{Duration, Instant};

use disk::NullDisk;
use rustix::thread::{CpuSet, sched_setaffinity};
use vhost::memory::{GuestRam, MemoryRange};
use vhost::{DeviceOptions, direct};

use front_end::{DATA, FrontEnd, request};
use guest::{GuestQueue, event};

const SAMPLES: usize = 4000;

fn bind_to(cpu: usize) {
    let mut set = CpuSet::new();
    set.set(cpu);
    // On a machine with one CPU, the threads share it.
    let _ = sched_setaffinity(None, &set);
}

fn median(mut samples: Vec<Duration>) -> Duration {
    samples.sort_unstable();
    samples[samples.len() / 2]
}

/// Waits for a completion by a blocking read of the event, as the bare ping-pong does.
fn round_trip(queue: &mut GuestQueue, buffers: &[guest::Buffer]) {
    queue.put(buffers);
    queue.want_call();
    if queue.publish() {
        queue.notify_always();
    }
    while queue.completed().is_none() {
        rustix::io::read(&queue.call, &mut [0; 8]).expect("the event can be read");
    }
}

fn main() {
    let mut arguments = std::env::args().skip(1).map(|text| text.parse::<u64>().expect("a number"));
    let poll = arguments.next().map_or(DeviceOptions::default().poll, Duration::from_micros);
    let rounds = arguments.next().unwrap_or(11);
    let (ours, theirs) = UnixStream::pair().expect("a pair of sockets");
    let (ping, pong) = (Arc::new(event()), Arc::new(event()));
    let (other_ping, other_pong) = (Arc::clone(&ping), Arc::clone(&pong));
    std::thread::spawn(move || {
        bind_to(1);
        loop {
            rustix::io::read(&*other_ping, &mut [0; 8]).expect("the event can be read");
            rustix::io::write(&*other_pong, &1u64.to_ne_bytes()).expect("the event can be written");
        }
    });
    std::thread::spawn(move || {
        bind_to(1);
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
        runtime.block_on(async {
            theirs.set_nonblocking(true).expect("a socket");
            let stream = tokio::net::UnixStream::from_std(theirs).expect("a socket");
            let options = DeviceOptions { queues: 1, poll };
            direct::serve(stream, Arc::new(NullDisk::new(1 << 30)), &options).await
        })
    });
    bind_to(0);
    let front_end = FrontEnd::connect(ours, 0, 0);
    front_end.share_memory();
    let mut queue = front_end.start_queue(0, 128);
    let read = request(&queue, DATA, 0, 8, 4096, true);
    let (mut bare, mut requests) = (Vec::new(), Vec::new());
    let timed = |operation: &mut dyn FnMut()| {
        let samples = (0..SAMPLES).map(|_| {
            let start = Instant::now();
            operation();
            start.elapsed()
        });
        median(samples.collect())
    };
    for _ in 0..rounds {
        bare.push(timed(&mut || {
            rustix::io::write(&*ping, &1u64.to_ne_bytes()).expect("the event can be written");
            rustix::io::read(&*pong, &mut [0; 8]).expect("the event can be read");
        }));
        requests.push(timed(&mut || round_trip(&mut queue, &read.buffers)));
    }
    assert_eq!(read.status(&queue), 0);
    let ratios: Vec<f64> =
        bare.iter().zip(&requests).map(|(b, r)| r.as_secs_f64() / b.as_secs_f64()).collect();
    let mut sorted = ratios.clone();
    sorted.sort_by(f64::total_cmp);
    println!("bare ping-pong  median of {rounds} medians: {:?}", median(bare));
    println!("null disk       median of {rounds} medians: {:?}", median(requests));
    println!(
        "ratio           median {:.2}, from {:.2} to {:.2}",
        sorted[sorted.len() / 2],
        sorted[0],
        sorted[sorted.len() - 1]
    );
}
