//! Measures the speed at which a node processes the data of a write, compared with `ec_encode_data`
//! alone. The measured function is the function of the osd that cuts a new object into the
//! operations for its fragments, with parity and checksums.

use std::fmt::Write as _;
use std::time::Instant;

use array::NewObjects;
use base::block::Payload;
use base::mem::Arena;
use base::pool::BufferPool;
use bytes::Bytes;
use ec::{Geometry, KernelChoice, Matrix, Transform};
use serde::Serialize;
use wire::Redundancy;

use super::{median, noise};
use node::failure::{Doing, Result};
use node::progress::ProgressMeter;

/// Sizes of objects whose data travels with its transaction, in bytes.
const OBJECTS: [usize; 2] = [2 << 20, 4 << 20];
/// Amount of data from which objects are taken, in bytes. It exceeds every cache.
const IN_MEMORY: usize = 96 << 20;
/// Size of the memory for the parity of a few objects, in bytes.
const POOL: usize = 64 << 20;

/// The result for one code, object size and location of the data. GB are 10^9 bytes of data.
#[derive(Debug, Serialize)]
pub struct Write {
    pub geometry: String,
    pub unit: usize,
    /// Size of an object in bytes, a multiple of the stripe size.
    pub object_bytes: usize,
    /// `cache`: the same object in every call; `memory`: a different object in each call.
    pub data_in: &'static str,
    /// Rate of `ec_encode_data` alone on the same fragments; missing without ISA-L.
    pub ec_encode_data_gb_per_s: Option<f64>,
    pub gb_per_s: f64,
    /// Median over rounds of the ratio to `ec_encode_data` in the same round.
    pub ratio: Option<f64>,
}

/// Measures all codes that a pool can have and whose stripes fit into an object.
pub fn measure(
    geometries: &[Geometry],
    unit: usize,
    rounds: u32,
    progress: &ProgressMeter,
) -> Result<Vec<Write>> {
    let data = Bytes::from(noise(IN_MEMORY));
    let mut all = vec![];
    for &geometry in geometries {
        let stripe = unit * geometry.k();
        let Some(redundancy) = redundancy(geometry, unit) else { continue };
        for bytes in OBJECTS.map(|bytes| bytes / stripe * stripe).into_iter().filter(|bytes| *bytes > 0) {
            for data_in in ["cache", "memory"] {
                progress.message(format!("{geometry}, objects of {bytes} bytes, data in {data_in}"));
                let work = WriteTrial::new((geometry, redundancy), unit, bytes, data_in, &data)?;
                all.push(work.measure(data_in, rounds, progress)?);
            }
        }
    }
    Ok(all)
}

/// Returns the redundancy scheme of a pool with this code, if such a pool is possible.
fn redundancy(geometry: Geometry, unit: usize) -> Option<Redundancy> {
    let (k, m) = (u8::try_from(geometry.k()).ok()?, u8::try_from(geometry.m()).ok()?);
    let redundancy = Redundancy::ErasureCode { k, m, stripe_unit: u32::try_from(unit).ok()? };
    redundancy.check().is_ok().then_some(redundancy)
}

/// Objects to cut into fragments, and a buffer for the parity of one object.
struct WriteTrial {
    geometry: Geometry,
    unit: usize,
    bytes: usize,
    /// The objects, used in turn. Their checksums are already known.
    objects: Vec<Payload>,
    cutter: NewObjects,
    parity: Vec<Vec<u8>>,
}

impl WriteTrial {
    fn new(
        (geometry, redundancy): (Geometry, Redundancy),
        unit: usize,
        bytes: usize,
        data_in: &str,
        data: &Bytes,
    ) -> Result<WriteTrial> {
        let doing = "measuring erasure coding";
        let pool = BufferPool::new(Arena::anonymous(POOL).doing(doing)?, 0, OBJECTS[0]);
        let object = |number: usize| Payload::compute(0, data.slice(number * bytes..(number + 1) * bytes));
        let count = data.len() / bytes;
        let objects = match data_in {
            "cache" => vec![object(0); count],
            _ => (0..count).map(object).collect(),
        };
        let parity = vec![vec![1; bytes / geometry.k()]; geometry.m()];
        let cutter = NewObjects::new(redundancy, pool).doing(doing)?;
        Ok(WriteTrial { geometry, unit, bytes, objects, cutter, parity })
    }

    fn measure(mut self, data_in: &'static str, rounds: u32, progress: &ProgressMeter) -> Result<Write> {
        let matrix = Matrix::parity(self.geometry);
        let bare = KernelChoice::Isal.load().ok().map(|isal| isal.prepare(&matrix));
        // Cut once without measuring, because the first use of memory causes page faults.
        self.cut()?;
        let (mut reference, mut writes) = (vec![], vec![]);
        for _ in 0..rounds {
            reference.extend(bare.as_ref().map(|bare| self.bare(&**bare)));
            writes.push(self.cut()?);
            progress.add(2 * (self.bytes * self.objects.len()) as u64);
        }
        let gb = (self.bytes * self.objects.len()) as f64 / 1e9;
        let ratios: Vec<f64> = reference.iter().zip(&writes).map(|(bare, write)| bare / write).collect();
        Ok(Write {
            geometry: self.geometry.to_string(),
            unit: self.unit,
            object_bytes: self.bytes,
            data_in,
            ec_encode_data_gb_per_s: (!reference.is_empty()).then(|| gb / median(reference)),
            gb_per_s: gb / median(writes),
            ratio: (!ratios.is_empty()).then(|| median(ratios)),
        })
    }

    /// Returns the seconds that `ec_encode_data` takes, called once per stripe.
    fn bare(&mut self, isal: &dyn Transform) -> f64 {
        let unit = self.unit;
        let start = Instant::now();
        for object in &self.objects {
            for (index, stripe) in object.data().chunks_exact(unit * self.geometry.k()).enumerate() {
                let sources: Vec<&[u8]> = stripe.chunks_exact(unit).collect();
                let parity = self.parity.iter_mut().map(|parity| &mut parity[index * unit..][..unit]);
                isal.apply(&sources, &mut parity.collect::<Vec<_>>());
            }
        }
        start.elapsed().as_secs_f64()
    }

    /// Returns the seconds for cutting all objects into fragments.
    fn cut(&self) -> Result<f64> {
        let start = Instant::now();
        for object in &self.objects {
            std::hint::black_box(self.cutter.cut(object.clone()).doing("cutting an object")?);
        }
        Ok(start.elapsed().as_secs_f64())
    }
}

/// Formats the results as a table.
pub fn table(all: &[Write]) -> String {
    let mut text = format!(
        "{:<8} {:<7} {:>8} {:>12}  {:>14} {:>7} {:>6}\n",
        "code", "data in", "unit", "object bytes", "ec_encode_data", "write", "ratio"
    );
    let two_digits = |figure: Option<f64>| figure.map_or("-".to_owned(), |figure| format!("{figure:.2}"));
    for one in all {
        let (bare, ratio) = (two_digits(one.ec_encode_data_gb_per_s), two_digits(one.ratio));
        // Writing to a string cannot fail.
        let _ = writeln!(
            text,
            "{:<8} {:<7} {:>8} {:>12}  {bare:>14} {:>7.2} {ratio:>6}",
            one.geometry, one.data_in, one.unit, one.object_bytes, one.gb_per_s
        );
    }
    text
}
