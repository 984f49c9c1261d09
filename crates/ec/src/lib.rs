//! Erasure coding: the code, the engines that compute it, and the choice of where it is computed.
//!
//! `code` is the mathematics: a systematic Reed–Solomon code, its parity, its decoding, and the change of parity that a
//! change of data makes. Kernels compute it (`kernel`). Where a piece of work is done, on the host's processor or on the
//! DPU, is decided by `offload`. This knows nothing of objects, pools or stores.

#![deny(unsafe_code)]
