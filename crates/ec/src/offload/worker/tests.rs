//! Tests workers without depending on real time.

use std::sync::mpsc;

use super::*;
use crate::offload::accelerator::{self, AcceleratorOptions};
use crate::offload::software::{self, Processor, SoftwareOptions};

const WORK: CodingWork = CodingWork { bytes: 1000, computed_fragments: 32 };

/// Rates of an infinitely fast device, and of a device too slow to answer during a test.
const INSTANT: f64 = 1e30;
const NEVER: f64 = 1.0;

fn device(host_rate: f64, queue: usize, batch_bytes: u64) -> Worker {
    let options = AcceleratorOptions::new(EngineRate::paper(host_rate));
    accelerator::start(AcceleratorOptions { queue, batch_bytes, ..options }).unwrap()
}

fn threads(threads: usize) -> Worker {
    software::start(SoftwareOptions { threads, ..SoftwareOptions::new(Processor::Dpu) }).unwrap()
}

/// Keeps one thread of the worker busy until the returned sender is used or dropped.
async fn hold(worker: &Worker) -> mpsc::Sender<()> {
    let (release, held) = mpsc::channel();
    let (begun, begins) = oneshot::channel();
    drop(tokio::spawn(worker.submit(WORK, move || {
        begun.send(()).unwrap();
        let _ = held.recv();
    })));
    begins.await.unwrap();
    release
}

#[tokio::test]
async fn tasks_run_in_submission_order_on_threads_of_the_workers_class() {
    let name = || std::thread::current().name().map(str::to_owned);
    for (worker, thread) in [(threads(1), "ec-0"), (device(INSTANT, 8, 1), "eca-0")] {
        let held = hold(&worker).await;
        let (done, order) = mpsc::channel();
        let results: Vec<_> = (0..5)
            .map(|number| {
                let done = done.clone();
                worker.submit(WORK, move || {
                    done.send(number).unwrap();
                    (number, name())
                })
            })
            .collect();
        drop((held, done));
        for (number, result) in (0..).zip(results) {
            assert_eq!(result.await, Ok((number, Some(thread.to_owned()))));
        }
        assert_eq!(order.iter().collect::<Vec<_>>(), [0, 1, 2, 3, 4]);
        let stats = worker.stats();
        assert_eq!((stats.tasks, stats.bytes, stats.batches, stats.queued), (6, 6000, 6, 0));
    }
}

#[tokio::test]
async fn the_threads_of_a_worker_execute_tasks_in_parallel() {
    let worker = threads(2);
    let _held = hold(&worker).await;
    assert_eq!(worker.submit(WORK, || 7).await, Ok(7));
}

#[tokio::test]
async fn waiting_tasks_form_batches_up_to_the_size_limit() {
    let worker = device(INSTANT, 16, 3500);
    let held = hold(&worker).await;
    let results: Vec<_> = (0..7).map(|number| worker.submit(WORK, move || number)).collect();
    let large = worker.submit(CodingWork { bytes: 9000, ..WORK }, || 7);
    drop(held);
    for (number, result) in (0..).zip(results) {
        assert_eq!(result.await, Ok(number));
    }
    assert_eq!(large.await, Ok(7), "a task larger than the limit is a batch of its own");
    // Batches: the held task, two batches of three, one single task, and the large task.
    let stats = worker.stats();
    assert_eq!((stats.tasks, stats.batches), (9, 5));
    assert_eq!(stats.overruns, 5, "no computer is as fast as this device");
    assert!(stats.name.contains("emulated"));
}

#[tokio::test]
async fn a_result_is_delayed_until_the_emulated_device_would_have_finished() {
    let worker = device(NEVER, 8, 1);
    let (computed, is_computed) = oneshot::channel();
    let mut result = Box::pin(worker.submit(WORK, move || computed.send(()).unwrap()));
    is_computed.await.unwrap();
    let poll = std::future::poll_fn(|cx| std::task::Poll::Ready(result.as_mut().poll(cx).is_pending()));
    assert!(poll.await, "the result is computed, but the device would need months");
    assert_eq!(worker.stats().overruns, 0);
    drop(worker);
    assert_eq!(result.await, Err(WorkerError::Stopped("accelerator (emulated)")));
}

#[tokio::test]
async fn a_panic_in_a_task_fails_only_this_task() {
    for worker in [threads(1), device(INSTANT, 8, 1 << 20)] {
        let held = hold(&worker).await;
        let bad = worker.submit(WORK, || panic!("for a test"));
        let good = worker.submit(WORK, || 7);
        drop(held);
        let bad: Result<(), _> = bad.await;
        assert_eq!(bad, Err(WorkerError::Panicked("for a test".to_owned())));
        assert_eq!(good.await, Ok(7));
        assert_eq!((worker.stats().tasks, worker.stats().failed), (2, 1));
    }
}

#[tokio::test]
async fn the_queue_is_bounded_and_abandoned_tasks_are_not_started() {
    let worker = device(INSTANT, 2, 1);
    let held = hold(&worker).await;
    let (begun, begins) = mpsc::channel();
    let unwanted = worker.submit(WORK, move || begun.send(()));
    let last = worker.submit(WORK, || 7);
    let refused = WorkerError::QueueFull { name: "accelerator (emulated)", waiting: 2 };
    assert_eq!(worker.submit(WORK, || 8).await, Err(refused));
    drop(unwanted);
    drop(held);
    assert_eq!(last.await, Ok(7));
    assert!(begins.recv().is_err(), "the closure of the abandoned task was dropped");
    assert_eq!(worker.stats().tasks, 2);
}

#[tokio::test]
async fn injected_faults_fail_only_the_tasks_that_they_hit() {
    let faults = Faults::default();
    let options = SoftwareOptions { faults: faults.clone(), ..SoftwareOptions::new(Processor::Dpu) };
    let worker = software::start(options).unwrap();
    faults.arm("ec.offload=fail,after=1,count=1".parse().unwrap()).unwrap();
    faults.arm("ec.offload=stall,late=1ms,after=2".parse().unwrap()).unwrap();
    let mut results = Vec::new();
    for number in 0..4 {
        results.push(worker.submit(WORK, move || number).await);
    }
    assert_eq!(results, [Ok(0), Err(WorkerError::Injected), Ok(2), Ok(3)]);
    assert_eq!(faults.fired(Site::EcOffload), 3, "one task failed, and two were delayed");
}

#[tokio::test]
async fn dropping_a_worker_abandons_tasks_that_have_not_started() {
    let worker = threads(1);
    let held = hold(&worker).await;
    let waiting = worker.submit(WORK, || 7);
    // Dropping the worker waits for the task in progress.
    let dropped = std::thread::spawn(move || drop(worker));
    assert_eq!(waiting.await, Err(WorkerError::Stopped("software")));
    drop(held);
    dropped.join().unwrap();
}

#[tokio::test(start_paused = true)]
async fn without_threads_the_submitting_thread_computes_and_a_stall_delays_only_the_result() {
    let faults = Faults::default();
    faults.arm("ec.offload=stall,late=300ms,count=1".parse().unwrap()).unwrap();
    let worker = software::inline(Processor::Dpu, faults);
    let began = Instant::now();
    let result = worker.submit(WORK, || std::thread::current().id());
    assert_eq!(worker.stats().tasks, 1, "the call that submits a task computes it");
    assert_eq!(result.await, Ok(std::thread::current().id()));
    // A task takes 100 ns. The runtime's timers have a resolution of 1 ms.
    assert_eq!(began.elapsed().as_millis(), 301);
    assert_eq!(worker.submit(WORK, || 7).await, Ok(7));
    assert_eq!(began.elapsed().as_millis(), 302, "the fault fires once");
    assert_eq!(worker.stats().cpu_ns, 200);
}

#[tokio::test(start_paused = true)]
async fn an_accelerator_without_a_thread_takes_simulated_time_and_has_the_faults_of_its_seed() {
    let results = async |seed: u64| {
        let faults = Faults::default();
        faults.arm(format!("ec.offload=fail,probability=0.3,seed={seed}").parse().unwrap()).unwrap();
        let options = AcceleratorOptions::new(EngineRate::paper(1e9));
        let worker = accelerator::inline(AcceleratorOptions { faults: faults.clone(), ..options });
        let began = Instant::now();
        let mut results = Vec::new();
        for number in 0..100 {
            results.push(worker.submit(WORK, move || number).await);
        }
        assert_eq!(began.elapsed().as_millis(), 100 * 25, "a batch takes 24.01 ms");
        assert_eq!(worker.stats().failed, faults.fired(Site::EcOffload));
        faults.clear();
        assert_eq!(worker.submit(WORK, || 7).await, Ok(7));
        results
    };
    assert_eq!(results(1).await, results(1).await);
    assert_ne!(results(1).await, results(2).await);
    assert!(results(3).await.contains(&Err(WorkerError::Injected)));
}
