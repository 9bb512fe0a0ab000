//! The names of links in `3fs-virt/iovs`: `ID[.bBLOCK]` is a buffer, `ID[.bBLOCK].rDEPTH…` a ring, `ID[.bBLOCK].gdr.dGPU` a
//! buffer in GPU memory.

use std::fmt;
use std::time::Duration;

use crate::{Error, Id, Result};

/// Which of the three semaphores announces a ring's submissions.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Hash, PartialOrd, Ord)]
pub enum Priority {
    /// Served first.
    High,
    /// The default.
    #[default]
    Normal,
    /// Served last.
    Low,
}

impl Priority {
    /// All priorities, from high to low.
    pub const ALL: [Self; 3] = [Self::High, Self::Normal, Self::Low];

    /// The priority of a number in API calls: negative is high, positive is low.
    #[must_use]
    pub fn from_number(number: i32) -> Self {
        match number {
            ..0 => Self::High,
            0 => Self::Normal,
            1.. => Self::Low,
        }
    }

    /// The link to its semaphore.
    #[must_use]
    pub const fn link(self) -> &'static str {
        match self {
            Self::High => "submit-ios.ph",
            Self::Normal => "submit-ios",
            Self::Low => "submit-ios.pl",
        }
    }
}

/// Parameters of a ring, as in its name.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct RingName {
    /// Whether it reads; else it writes.
    pub read: bool,
    /// How many are taken at once: all for 0, exactly this many above, and at most this many below.
    pub depth: i32,
    /// The priority.
    pub priority: Priority,
    /// How long fewer submissions than a negative depth requests may wait for more.
    pub timeout: Duration,
    /// See [`flag`](crate::flag).
    pub flags: u64,
}

/// A link's name, parsed.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Name {
    /// The buffer's id.
    pub id: Id,
    /// Bytes of a block, across whose ends no transfer may go; 0 for none.
    pub block: u64,
    /// For a ring.
    pub ring: Option<RingName>,
    /// For GPU memory: the program's number of the GPU.
    pub gpu: Option<u32>,
}

impl Name {
    /// The name of a buffer in host memory.
    #[must_use]
    pub fn buffer(id: Id, block: u64) -> Self {
        Self { id, block, ring: None, gpu: None }
    }

    /// Parses a name.
    ///
    /// # Errors
    /// When it is invalid.
    pub fn parse(name: &str) -> Result<Self> {
        let bad = |why| Error::Name { name: name.chars().take(80).collect(), why };
        let mut parts = name.split('.');
        let id = parts.next().and_then(Id::parse).ok_or(bad("it does not begin with a UUID"))?;
        let mut this = Self::buffer(id, 0);
        let (mut gpu, mut device, mut ring) = (false, None, None);
        let (mut priority, mut timeout, mut flags) = (None, None, None);
        for part in parts {
            let mut letters = part.chars();
            let first = letters.next().ok_or(bad("there is nothing between two dots"))?;
            let rest = letters.as_str();
            match first {
                'b' => {
                    this.block = number(rest)
                        .filter(|n| *n > 0)
                        .ok_or(bad("its block size is not a number above 0"))?
                }
                'r' | 'w' => {
                    let depth = rest.parse::<i32>().ok().filter(|n| *n > i32::MIN);
                    ring = Some((first == 'r', depth.ok_or(bad("its depth is not a number"))?));
                }
                't' => timeout = Some(number(rest).ok_or(bad("its time is not a number"))?),
                'f' => flags = Some(binary(rest).ok_or(bad("its flags are not a binary number"))?),
                'p' => {
                    priority = Some(match rest {
                        "" | "n" => Priority::Normal,
                        "h" => Priority::High,
                        "l" => Priority::Low,
                        _ => return Err(bad("its priority is not h, n or l")),
                    });
                }
                'g' if rest == "dr" => gpu = true,
                'd' => {
                    let known = number(rest).and_then(|n| u32::try_from(n).ok());
                    device = Some(known.ok_or(bad("its GPU is not a number"))?);
                }
                _ => return Err(bad("it has an unknown part")),
            }
        }
        if gpu != device.is_some() || gpu && ring.is_some() {
            return Err(bad("GPU memory is .gdr.dNUMBER, without parts of a ring"));
        }
        this.gpu = device;
        this.ring = ring.map(|(read, depth)| RingName {
            read,
            depth,
            priority: priority.unwrap_or_default(),
            timeout: Duration::from_millis(timeout.unwrap_or(0)),
            flags: flags.unwrap_or(0),
        });
        if ring.is_none() && (priority.is_some() || timeout.is_some() || flags.is_some()) {
            return Err(bad("it has parts of a ring, but no depth"));
        }
        Ok(this)
    }
}

/// Parses digits, without a sign.
fn number(text: &str) -> Option<u64> {
    text.bytes().all(|b| b.is_ascii_digit()).then(|| text.parse().ok())?
}

fn binary(text: &str) -> Option<u64> {
    text.bytes().all(|b| matches!(b, b'0' | b'1')).then(|| u64::from_str_radix(text, 2).ok())?
}

impl fmt::Display for Name {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.id)?;
        if self.block > 0 {
            write!(f, ".b{}", self.block)?;
        }
        if let Some(device) = self.gpu {
            write!(f, ".gdr.d{device}")?;
        }
        let Some(ring) = &self.ring else { return Ok(()) };
        write!(f, ".{}{}", if ring.read { 'r' } else { 'w' }, ring.depth)?;
        f.write_str(match ring.priority {
            Priority::High => ".ph",
            Priority::Normal => "",
            Priority::Low => ".pl",
        })?;
        write!(f, ".t{}", ring.timeout.as_millis())?;
        if ring.flags > 0 {
            write!(f, ".f{:b}", ring.flags)?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const ID: &str = "01234567-89ab-4def-8123-456789abcdef";

    #[test]
    fn names_of_3fs() {
        let ring = Name::parse(&format!("{ID}.w-8.ph.t250.f10")).unwrap();
        let meant = RingName {
            read: false,
            depth: -8,
            priority: Priority::High,
            timeout: Duration::from_millis(250),
            flags: 2,
        };
        assert_eq!(ring.ring, Some(meant));
        assert_eq!(ring.to_string(), format!("{ID}.w-8.ph.t250.f10"));
        assert_eq!(Name::parse(&format!("{ID}.b4096")).unwrap().block, 4096);
        assert_eq!(Name::parse(&format!("{ID}.gdr.d3")).unwrap().gpu, Some(3));
        assert_eq!(Name::parse(&ID.replace('-', "")).unwrap().to_string(), ID);
        for bad in [
            "",
            ".b0",
            ".b",
            ".b-1",
            ".b+1",
            ".rx",
            ".r",
            ".t5",
            ".r0.t-1",
            ".r0.f2",
            ".r0.px",
            ".gdr",
            ".d0",
            ".gdr.d-1",
            ".gdr.d0.r0.t0",
            ".z",
            ".r0.",
            ".r99999999999",
            ".gdr.d99999999999",
            ".r-2147483648",
        ] {
            let name = if bad.is_empty() { String::new() } else { format!("{ID}{bad}") };
            assert!(Name::parse(&name).is_err(), "{name}");
        }
    }

    proptest! {
        #[test]
        fn names_round_trip(
            id: [u8; 16], block: u64, depth in i32::MIN + 1.., read: bool, which in 0_usize..3,
            millis in 0_u64..1 << 40, flags: u64, kind in 0..3, gpu: u32,
        ) {
            let ring = RingName {
                read, depth, flags,
                priority: Priority::ALL[which],
                timeout: Duration::from_millis(millis),
            };
            let name = Name {
                id: Id(id),
                block,
                ring: (kind == 1).then_some(ring),
                gpu: (kind == 2).then_some(gpu),
            };
            prop_assert_eq!(Name::parse(&name.to_string()).unwrap(), name);
        }

        #[test]
        fn no_name_panics(text in "\\PC{0,60}") {
            let _ = Name::parse(&text);
            let _ = Name::parse(&format!("{ID}.{text}"));
        }
    }
}
