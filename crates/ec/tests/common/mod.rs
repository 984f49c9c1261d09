//! Helpers shared by the tests of the erasure code.

#![allow(dead_code, clippy::print_stdout)]

use ec::{Code, Geometry, Kernel, KernelChoice};

/// Returns all kernels. Omits the kernel GFNI, and prints this, if the processor lacks GFNI.
///
/// # Panics
/// If ISA-L cannot be loaded.
pub fn kernels() -> Vec<&'static dyn Kernel> {
    let mut kernels = vec![KernelChoice::Portable.load().unwrap()];
    match KernelChoice::Gfni.load() {
        Ok(gfni) => kernels.push(gfni),
        Err(e) => println!("SKIPPED for GFNI: {e}"),
    }
    let isal = KernelChoice::Isal.load();
    kernels.push(isal.unwrap_or_else(|e| panic!("{e}; run \"scripts/setup test\"")));
    kernels
}

/// Returns one code per available kernel.
pub fn codes(k: usize, m: usize) -> Vec<Code> {
    let geometry = Geometry::new(k, m).unwrap();
    kernels().into_iter().map(|kernel| Code::new(geometry, kernel)).collect()
}

/// Returns pseudo-random bytes, which depend only on the seed.
pub fn noise(seed: u64, len: usize) -> Vec<u8> {
    let mut x = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut next = || {
        x ^= x << 13;
        x ^= x >> 7;
        x ^= x << 17;
        (x >> 24) as u8
    };
    (0..len).map(|_| next()).collect()
}

/// Returns `k` data fragments of pseudo-random bytes, and their `m` parity fragments.
pub fn fragments(code: &Code, seed: u64, len: usize) -> Vec<Vec<u8>> {
    let (k, m) = (code.geometry().k(), code.geometry().m());
    let mut fragments: Vec<Vec<u8>> = (0..k as u64).map(|n| noise(seed ^ n << 32, len)).collect();
    let mut parity = vec![vec![0xee; len]; m];
    code.encode(&slices(&fragments), &mut slices_mut(&mut parity)).unwrap();
    fragments.extend(parity);
    fragments
}

pub fn slices(fragments: &[Vec<u8>]) -> Vec<&[u8]> {
    fragments.iter().map(Vec::as_slice).collect()
}

pub fn slices_mut(fragments: &mut [Vec<u8>]) -> Vec<&mut [u8]> {
    fragments.iter_mut().map(Vec::as_mut_slice).collect()
}

/// Reconstructs the fragments `lost` from the other fragments, and asserts that they are correct.
pub fn lose_and_recover(code: &Code, fragments: &[Vec<u8>], lost: &[usize]) {
    let present: Vec<usize> = (0..fragments.len()).filter(|fragment| !lost.contains(fragment)).collect();
    let recovery = code.recovery(&present, lost).unwrap();
    let sources: Vec<&[u8]> =
        recovery.sources().iter().map(|fragment| fragments[*fragment].as_slice()).collect();
    let mut out = vec![vec![0x55; fragments[0].len()]; lost.len()];
    recovery.run(&sources, &mut slices_mut(&mut out)).unwrap();
    for (fragment, out) in lost.iter().zip(&out) {
        assert_eq!(out, &fragments[*fragment], "{} without {lost:?}: fragment {fragment}", code.geometry());
    }
}
