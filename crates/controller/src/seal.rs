//! The seal by which the null controller recognises an entry as its driver submitted it: a hash of the command in the
//! field of PRP2, which a controller that moves nothing does not need.
//!
//! Dword 8 holds [`hash`] of dwords 0 to 7 and 10 to 15. The hash excludes dword 0's CID, because drivers choose it
//! when they submit. Dword 9 holds the same, rotated by half and salted, so that an entry of one repeated word has no
//! seal. An entry mixed from two commands is detected if any dword but the first differs. One that is stale as a whole
//! is not, but its CID is wrong then, and the driver sees that.

use onehop_proto::Sqe;
use onehop_proto::kernel::WorkItem;

const SALT: u32 = 0x6f6e_6568;

/// A dword's share: the factors differ and are odd, so that both swaps and shifts are detected.
#[inline(always)]
const fn term(word: u32, factor: u32) -> u32 {
    let product = word.wrapping_add(SALT).wrapping_mul(factor);
    product ^ product >> 15
}

/// A sum of independent terms: a lane that hashes four entries waits for none of them. Written out, because a loop over
/// an array would be in memory on a GPU.
#[inline(always)]
const fn hash(dw: &[u32; 16]) -> u32 {
    let [a, b, c, d, e, f, g, h, _, _, k, l, m, n, o, p] = *dw;
    let first = term(a & 0xffff, 0x9e37_79b1).wrapping_add(term(b, 0x85eb_ca77));
    let second = term(c, 0xc2b2_ae3d).wrapping_add(term(d, 0x27d4_eb2f));
    let third = term(e, 0x1656_67b1).wrapping_add(term(f, 0xd3a2_646d));
    let fourth = term(g, 0xfd70_46c5).wrapping_add(term(h, 0xb55a_4f09));
    let fifth = term(k, 0x8ebc_6af1).wrapping_add(term(l, 0x5899_65cd));
    let sixth = term(m, 0x1d8e_4e27).wrapping_add(term(n, 0xeb44_acab));
    let seventh = term(o, 0xc8ed_f0bd).wrapping_add(term(p, 0x3c6e_f373));
    let half = first.wrapping_add(second).wrapping_add(third.wrapping_add(fourth));
    SALT.wrapping_add(half).wrapping_add(fifth.wrapping_add(sixth).wrapping_add(seventh))
}

/// PRP2 of an entry as the null controller expects it.
#[inline(always)]
#[must_use]
pub const fn seal(sqe: &Sqe) -> u64 {
    let low = hash(&sqe.dw);
    low as u64 | ((low.rotate_left(16) ^ SALT) as u64) << 32
}

/// Whether an entry is intact.
#[inline(always)]
#[must_use]
pub const fn is_sealed(sqe: &Sqe) -> bool {
    sqe.prp2() == seal(sqe)
}

/// The same work item with its seal in PRP2: what a driver submits to the null controller. `nsid` is the namespace of
/// its job.
#[inline]
#[must_use]
pub const fn sealed(mut work: WorkItem, nsid: u32) -> WorkItem {
    work.prp2 = seal(&work.command(nsid));
    work
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_bit_counts_but_the_cid() {
        let work =
            WorkItem { lba: 0x1_2345_6789, prp1: 0x40_0000_1000, prp2: 77, blocks: 8, control: 0x4000_0002 };
        let sqe = sealed(work, 1).command(1);
        assert!(is_sealed(&sqe));
        assert!(is_sealed(&sqe.with_cid(0xabcd)));
        for dword in 0..16 {
            for bit in 0..32 {
                let mut other = sqe;
                other.dw[dword] ^= 1 << bit;
                assert_eq!(is_sealed(&other), dword == 0 && bit >= 16, "dword {dword}, bit {bit}");
            }
        }
        assert!(!is_sealed(&Sqe::default()));
    }

    #[test]
    fn parts_of_two_commands_do_not_fit_together() {
        let command = |i: u64| {
            let work = WorkItem { lba: i * 8, prp1: i << 12, prp2: 0, blocks: 8, control: 2 };
            sealed(work, 1).command(1)
        };
        for i in 0..2000 {
            let (new, old) = (command(i + 1024), command(i));
            // Torn at each 16-byte and each 32-byte boundary; the first sixteen bytes are the same in both.
            for cut in [8, 12] {
                let mut torn = new;
                torn.dw[cut..].copy_from_slice(&old.dw[cut..]);
                let same = torn == new || torn == old;
                assert_eq!(is_sealed(&torn), same, "command {i} torn at {cut}");
            }
        }
    }
}
