//! Arithmetic in the field GF(2^8) with the polynomial x^8 + x^4 + x^3 + x^2 + 1 (0x11d). Addition
//! is XOR.

/// The polynomial without its highest term.
const POLYNOMIAL: u8 = 0x1d;

/// `LOG[x]` is the base-2 logarithm of `x` in the field. 0 has no logarithm.
const LOG: [u8; 256] = tables().0;
/// `POWER[n]` is 2 to the power of `n`. The table repeats once, so that the sum of two logarithms
/// needs no modulo.
const POWER: [u8; 510] = tables().1;

const fn tables() -> ([u8; 256], [u8; 510]) {
    let (mut log, mut power) = ([0; 256], [0; 510]);
    let (mut x, mut n) = (1_u8, 0);
    while n < 255 {
        log[x as usize] = n as u8;
        power[n] = x;
        power[n + 255] = x;
        x = double(x);
        n += 1;
    }
    (log, power)
}

/// Multiplies `x` by 2.
pub(crate) const fn double(x: u8) -> u8 {
    // Spreads the highest bit to all bits without a branch, so that compilers can vectorize the
    // function.
    let carry = ((x as i8) >> 7) as u8;
    (x << 1) ^ (carry & POLYNOMIAL)
}

/// Multiplies `a` by `b`.
pub(crate) const fn mul(a: u8, b: u8) -> u8 {
    if a == 0 || b == 0 {
        return 0;
    }
    POWER[LOG[a as usize] as usize + LOG[b as usize] as usize]
}

/// Multiplicative inverse of `x`. `x` must not be 0.
pub(crate) const fn inverse(x: u8) -> u8 {
    assert!(x != 0, "0 has no inverse");
    POWER[255 - LOG[x as usize] as usize]
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Schoolbook multiplication: shift, add, reduce.
    fn by_hand(a: u8, b: u8) -> u8 {
        let mut product =
            (0..8).filter(|bit| b >> bit & 1 == 1).fold(0_u16, |sum, bit| sum ^ (u16::from(a) << bit));
        for bit in (8..16).rev() {
            if product >> bit & 1 == 1 {
                product ^= 0x11d << (bit - 8);
            }
        }
        product as u8
    }

    #[test]
    fn every_product_equals_schoolbook_multiplication() {
        for a in 0..=255 {
            assert_eq!(double(a), by_hand(a, 2));
            for b in 0..=255 {
                assert_eq!(mul(a, b), by_hand(a, b), "{a} * {b}");
            }
        }
    }

    #[test]
    fn every_element_times_its_inverse_is_one() {
        for x in 1..=255 {
            assert_eq!(by_hand(x, inverse(x)), 1, "{x}");
        }
    }
}
