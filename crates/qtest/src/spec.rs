//! The name of a drive: `SOCKET,MEMORY-FILE[,bdf=DD.F]`.

use std::path::PathBuf;

use crate::{Error, Result};

/// A parsed drive name.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Spec {
    /// QEMU's qtest socket.
    pub socket: PathBuf,
    /// The file behind the guest's RAM.
    pub memory: PathBuf,
    /// Device and function on bus 0, as `device << 3 | function`; `None` selects the only controller.
    pub devfn: Option<u8>,
}

impl Spec {
    /// Parses a name.
    pub(crate) fn parse(text: &str) -> Result<Self> {
        let bad = |why: &str| Error::Spec { spec: text.into(), why: why.into() };
        let mut parts = text.split(',');
        let socket = parts.next().filter(|p| !p.is_empty()).ok_or_else(|| bad("the socket is missing"))?;
        let memory =
            parts.next().filter(|p| !p.is_empty()).ok_or_else(|| bad("the memory file is missing"))?;
        let mut spec = Self { socket: socket.into(), memory: memory.into(), devfn: None };
        for option in parts {
            let bdf = option.strip_prefix("bdf=").ok_or_else(|| {
                bad(&format!("'{option}' is not an option (and file names cannot contain a comma)"))
            })?;
            spec.devfn = Some(
                devfn(bdf).ok_or_else(|| bad(&format!("'{bdf}' is not a device on bus 0 such as 02.0")))?,
            );
        }
        Ok(spec)
    }
}

/// Parses `DD.F` in hexadecimal, optionally with bus 0 in front, to `device << 3 | function`.
fn devfn(bdf: &str) -> Option<u8> {
    let short = bdf.strip_prefix("0000:").unwrap_or(bdf);
    let short = short.strip_prefix("00:").unwrap_or(short);
    let (device, function) = short.split_once('.')?;
    let digits = |text: &str| text.bytes().all(|b| b.is_ascii_hexdigit());
    if !digits(device) || !digits(function) {
        return None;
    }
    let device = u8::from_str_radix(device, 16).ok().filter(|d| *d < 32)?;
    let function = u8::from_str_radix(function, 16).ok().filter(|f| *f < 8)?;
    Some(device << 3 | function)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_taken_apart() {
        let plain = Spec::parse("/tmp/qt.sock,/dev/shm/ram").unwrap();
        assert_eq!(plain, Spec { socket: "/tmp/qt.sock".into(), memory: "/dev/shm/ram".into(), devfn: None });
        for (bdf, wanted) in [("02.0", 16), ("1f.7", 255), ("00:02.1", 17), ("0000:00:3.0", 24)] {
            assert_eq!(Spec::parse(&format!("a,b,bdf={bdf}")).unwrap().devfn, Some(wanted));
        }
    }

    #[test]
    fn bad_names_are_refused_with_the_form_that_is_wanted() {
        for text in
            ["", "a", "a,", ",b", "a,b,", "a,b,c", "a,b,bdf=", "a,b,bdf=20.0", "a,b,bdf=1.8", "a,b,bdf=+1.0"]
        {
            let error = Spec::parse(text).unwrap_err().to_string();
            assert!(error.contains("qtest:SOCKET,MEMORY-FILE"), "{error}");
        }
    }
}
