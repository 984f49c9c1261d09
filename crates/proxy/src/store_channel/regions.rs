//! The memory-region cache: parts of host memory that are open to DMA.
//!
//! Before a device can access a part of host memory, the host must open the part and the device
//! must register it. This costs a round trip and a mapping. The cache therefore opens a whole
//! *window* of the data region once and keeps it open. It evicts the least recently used window
//! first (DoCeph, section 3.3: "reusing pre-established memory regions instead of performing
//! CommChannel negotiation for each transfer"). Ranges and windows are aligned to the longest
//! range, so no range crosses the end of a window.

use std::ops::Range;
use std::sync::Arc;

use base::collections::HashMap;
use channel::DmaRegion;

/// An open window of host memory, which a job may access by DMA.
#[derive(Clone)]
pub(super) struct OpenedWindow {
    pub(super) region: Arc<DmaRegion>,
    /// Start of the region, in bytes from the start of host memory.
    pub(super) origin: usize,
}

/// A window in the cache.
struct CachedWindow {
    region: Arc<DmaRegion>,
    used: u64,
}

/// A window that is being opened.
#[derive(Default)]
struct Asked {
    /// Number of requests to open the window that the host has not answered.
    times: usize,
    waiting: Vec<u64>,
}

/// The windows of one incarnation.
pub(super) struct Regions {
    /// Length of a window, in bytes.
    window: usize,
    /// Length of the data region, in bytes.
    total: usize,
    /// Maximum number of cached windows. With 0, every job asks the host to open its window.
    capacity: usize,
    kept: HashMap<usize, CachedWindow>,
    clock: u64,
    /// Windows that are being opened, with the jobs that wait for them.
    asked: HashMap<usize, Asked>,
    hits: metrics::Counter,
    misses: metrics::Counter,
    evictions: metrics::Counter,
}

impl Regions {
    pub(super) fn new(window: usize, total: usize, capacity: usize) -> Regions {
        Regions {
            window,
            total,
            capacity,
            kept: HashMap::default(),
            clock: 0,
            asked: HashMap::default(),
            hits: metrics::counter!("outboard_channel_region_cache", "result" => "hit"),
            misses: metrics::counter!("outboard_channel_region_cache", "result" => "miss"),
            evictions: metrics::counter!("outboard_channel_region_cache", "result" => "eviction"),
        }
    }

    /// Drops all cached windows, because host memory was attached again or a window may be broken.
    pub(super) fn forget(&mut self) {
        self.kept.clear();
    }

    /// Changes the maximum number of cached windows.
    pub(super) fn set_capacity(&mut self, capacity: usize) {
        self.capacity = capacity;
        self.evict();
    }

    /// The index of the window that contains this offset in the data region.
    pub(super) fn window_of(&self, offset: usize) -> usize {
        offset / self.window
    }

    /// The range of the data region that a window covers, in bytes from the region's start.
    pub(super) fn range_of(&self, window: usize) -> Range<usize> {
        let start = window * self.window;
        start..(start + self.window).min(self.total)
    }

    /// The region of a window, if it is open.
    pub(super) fn get(&mut self, window: usize) -> Option<Arc<DmaRegion>> {
        self.clock += 1;
        let Some(kept) = self.kept.get_mut(&window) else {
            self.misses.increment(1);
            return None;
        };
        self.hits.increment(1);
        kept.used = self.clock;
        Some(Arc::clone(&kept.region))
    }

    /// Registers a job that waits for a window. Returns whether the caller must ask the host to
    /// open the window.
    pub(super) fn wait(&mut self, window: usize, job: u64) -> bool {
        let asked = self.asked.entry(window).or_default();
        asked.waiting.push(job);
        // Without a cache, every job sends its own request to the host.
        let asks = asked.times == 0 || self.capacity == 0;
        asked.times += usize::from(asks);
        asks
    }

    /// Caches a window that was opened, and returns the waiting jobs that can continue.
    pub(super) fn opened(&mut self, window: usize, region: &Arc<DmaRegion>) -> Vec<u64> {
        if self.capacity == 0 {
            let Some(asked) = self.asked.get_mut(&window) else { return Vec::new() };
            asked.times = asked.times.saturating_sub(1);
            // If several jobs shared a request that was made before the cache was switched off,
            // they also share the answer.
            if asked.times > 0 && !asked.waiting.is_empty() {
                return vec![asked.waiting.remove(0)];
            }
        } else {
            self.clock += 1;
            self.kept.insert(window, CachedWindow { region: Arc::clone(region), used: self.clock });
            self.evict();
        }
        self.asked.remove(&window).map(|asked| asked.waiting).unwrap_or_default()
    }

    fn evict(&mut self) {
        while self.kept.len() > self.capacity {
            let Some(oldest) = self.kept.iter().min_by_key(|(_, kept)| kept.used).map(|(window, _)| *window)
            else {
                return;
            };
            self.kept.remove(&oldest);
            self.evictions.increment(1);
        }
    }

    /// Cancels all waits and returns the jobs that waited.
    pub(super) fn give_up(&mut self) -> Vec<u64> {
        let mut waiting: Vec<u64> =
            std::mem::take(&mut self.asked).into_values().flat_map(|asked| asked.waiting).collect();
        waiting.sort_unstable();
        waiting
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use channel::{OnDrop, RegionId};
    use std::sync::Mutex;

    #[test]
    fn the_least_recently_used_window_is_evicted_but_stays_registered_while_used() {
        let gone = Arc::new(Mutex::new(Vec::new()));
        let region = |id: u32| {
            let gone = Arc::clone(&gone);
            let unregister = OnDrop::new(move || gone.lock().unwrap().push(id));
            Arc::new(DmaRegion::new(RegionId::NONE, 4096, unregister))
        };
        let mut regions = Regions::new(4096, 10_000, 2);
        assert_eq!((regions.window_of(8191), regions.range_of(2)), (1, 8192..10_000));
        assert!(regions.get(0).is_none());
        assert!(regions.wait(0, 7) && !regions.wait(0, 8), "the host is asked only once");
        assert_eq!(regions.opened(0, &region(0)), [7, 8]);
        regions.opened(1, &region(1));
        let in_use = regions.get(0).unwrap();
        regions.opened(2, &region(2));
        assert_eq!(*gone.lock().unwrap(), [1]);
        regions.get(2).unwrap();
        regions.opened(3, &region(3));
        assert!(regions.get(0).is_none());
        assert_eq!(*gone.lock().unwrap(), [1], "a window in use stays registered");
        drop(in_use);
        assert_eq!(*gone.lock().unwrap(), [1, 0]);
        regions.set_capacity(0);
        assert_eq!(gone.lock().unwrap().len(), 4);
        assert!(regions.wait(1, 4) && regions.wait(1, 5), "without a cache, each job asks the host");
        assert_eq!(regions.opened(1, &region(9)), [4]);
        assert_eq!(regions.give_up(), [5]);
    }

    #[test]
    fn every_waiting_job_continues_when_the_cache_is_switched_off_or_on() {
        let region = Arc::new(DmaRegion::new(RegionId::NONE, 4096, OnDrop::new(|| ())));
        let mut regions = Regions::new(4096, 8192, 1);
        assert!(regions.wait(0, 1) && !regions.wait(0, 2), "the host is asked once for both jobs");
        regions.set_capacity(0);
        assert!(regions.wait(0, 3), "without a cache, the third job asks again");
        assert_eq!(regions.opened(0, &region), [1]);
        assert_eq!(regions.opened(0, &region), [2, 3], "the last answer serves all remaining jobs");
        assert!(regions.wait(0, 4) && regions.wait(0, 5));
        regions.set_capacity(1);
        assert_eq!(regions.opened(0, &region), [4, 5]);
        assert_eq!(regions.opened(0, &region), [0; 0], "no job waits for the second answer");
        assert!(regions.get(0).is_some());
    }
}
