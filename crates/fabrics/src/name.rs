//! The name of a target: `nvme-tcp://HOST:PORT/NQN`, with options.

use std::path::PathBuf;
use std::str::FromStr;
use std::time::Duration;

use onehop_proto::fabrics::{DISCOVERY_NQN, MAX_NQN};

use crate::pdu::Digests;
use crate::{Error, Result};

/// The scheme of a target's name.
pub const SCHEME: &str = "nvme-tcp://";

/// The default port of NVM subsystems.
const PORT: u16 = 4420;
/// The default port of discovery services.
const DISCOVERY_PORT: u16 = 8009;

/// The form of a target's name.
pub const FORM: &str = "nvme-tcp://HOST[:PORT][/NQN][?OPTION=VALUE[&…]], an IPv6 address in brackets; options are digests \
    (header, data or all), hostnqn, hostid, dhchap and dhchap-ctrl (files with secrets), keepalive and reconnect (in seconds)";

/// A subsystem's address and connection options.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct SubsystemAddress {
    /// A host name or an address, without brackets.
    pub host: String,
    /// The TCP port.
    pub port: u16,
    /// The subsystem; `None` for the discovery service.
    pub nqn: Option<String>,
    /// The digests to request.
    pub digests: Digests,
    /// The host's NQN; `None` for this machine's (`/etc/nvme/hostnqn`).
    pub host_nqn: Option<String>,
    /// The host's identifier; `None` for this machine's (`/etc/nvme/hostid`).
    pub host_id: Option<[u8; 16]>,
    /// The file with the host's secret.
    pub secret: Option<PathBuf>,
    /// The file with the target's secret.
    pub target_secret: Option<PathBuf>,
    /// Time after which the controller ends a silent connection.
    pub keep_alive: Duration,
    /// How long to try to restore a lost connection.
    pub reconnect: Duration,
}

impl SubsystemAddress {
    /// The NQN to connect to.
    #[must_use]
    pub fn subsystem(&self) -> &str {
        self.nqn.as_deref().unwrap_or(DISCOVERY_NQN)
    }

    /// Host and port in their usual form.
    #[must_use]
    pub fn address(&self) -> String {
        if self.host.contains(':') {
            format!("[{}]:{}", self.host, self.port)
        } else {
            format!("{}:{}", self.host, self.port)
        }
    }
}

impl std::fmt::Display for SubsystemAddress {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{SCHEME}{}", self.address())?;
        self.nqn.as_ref().map_or(Ok(()), |nqn| write!(f, "/{nqn}"))
    }
}

impl FromStr for SubsystemAddress {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        let bad = |why: String| Error::Name { name: text.escape_debug().to_string(), why };
        let rest = text.strip_prefix(SCHEME).ok_or_else(|| bad(format!("the form is {FORM}")))?;
        let (rest, options) = rest.split_once('?').unwrap_or((rest, ""));
        let (authority, nqn) = rest.split_once('/').unwrap_or((rest, ""));
        let (host, port) = host_and_port(authority).map_err(&bad)?;
        check_nqn(nqn).map_err(&bad)?;
        let mut target = Self {
            host: host.to_owned(),
            port: port.unwrap_or(if nqn.is_empty() { DISCOVERY_PORT } else { PORT }),
            nqn: (!nqn.is_empty()).then(|| nqn.to_owned()),
            digests: Digests::default(),
            host_nqn: None,
            host_id: None,
            secret: None,
            target_secret: None,
            keep_alive: Duration::from_secs(10),
            reconnect: Duration::from_secs(60),
        };
        for option in options.split('&').filter(|option| !option.is_empty()) {
            let (name, value) = option.split_once('=').unwrap_or((option, ""));
            target.set(name, value).map_err(&bad)?;
        }
        if target.target_secret.is_some() && target.secret.is_none() {
            return Err(bad("dhchap-ctrl needs dhchap: give the host's secret, too".into()));
        }
        Ok(target)
    }
}

impl SubsystemAddress {
    fn set(&mut self, name: &str, value: &str) -> std::result::Result<(), String> {
        let seconds = |least: u64, most: u64| {
            let number = value.parse().ok().filter(|number| (least..=most).contains(number));
            number.map(Duration::from_secs).ok_or_else(|| format!("{name} takes {least} to {most} seconds"))
        };
        let file = |value: &str| {
            Some(PathBuf::from(value))
                .filter(|path| !path.as_os_str().is_empty())
                .ok_or_else(|| format!("{name} takes the name of a file"))
        };
        match name {
            "digests" => {
                let (header, data) = match value {
                    "header" => (true, false),
                    "data" => (false, true),
                    "all" => (true, true),
                    _ => return Err("digests are header, data or all".into()),
                };
                self.digests = Digests { header, data };
            }
            "hostnqn" => {
                check_nqn(value)?;
                self.host_nqn = Some(value.to_owned()).filter(|nqn| !nqn.is_empty());
            }
            "hostid" => {
                self.host_id = Some(uuid(value).ok_or("hostid takes a UUID")?);
            }
            "dhchap" => self.secret = Some(file(value)?),
            "dhchap-ctrl" => self.target_secret = Some(file(value)?),
            "keepalive" => self.keep_alive = seconds(1, 3600)?,
            "reconnect" => self.reconnect = seconds(0, 86400)?,
            _ => return Err(format!("there is no option '{}'; {FORM}", name.escape_debug())),
        }
        Ok(())
    }
}

fn host_and_port(authority: &str) -> std::result::Result<(&str, Option<u16>), String> {
    let (host, port) = match authority.strip_prefix('[') {
        Some(rest) => {
            let (host, rest) = rest.split_once(']').ok_or("its address has no closing bracket")?;
            host.parse::<std::net::Ipv6Addr>().map_err(|_| format!("'{host}' is not an IPv6 address"))?;
            (host, rest)
        }
        None => authority.split_at(authority.find(':').unwrap_or(authority.len())),
    };
    if host.is_empty() || host.contains(|c: char| c.is_whitespace() || c.is_control()) {
        return Err(format!("it has no host; the form is {FORM}"));
    }
    let port = match port.strip_prefix(':') {
        None if port.is_empty() => None,
        // A second colon belongs to an IPv6 address without brackets.
        Some(digits) if digits.bytes().all(|byte| byte.is_ascii_digit()) => {
            Some(digits.parse().ok().filter(|port| *port > 0).ok_or("a port is a number from 1 to 65535")?)
        }
        _ => return Err("what follows the host is not a port; an IPv6 address takes brackets".into()),
    };
    Ok((host, port))
}

/// Refuses invalid NQNs; an empty one stands for none.
pub(crate) fn check_nqn(nqn: &str) -> std::result::Result<(), String> {
    if nqn.len() > MAX_NQN {
        return Err(format!("an NQN has at most {MAX_NQN} bytes, this one has {}", nqn.len()));
    }
    let is_nqn = nqn.starts_with("nqn.") && nqn.bytes().all(|byte| byte.is_ascii_graphic());
    if !nqn.is_empty() && !is_nqn {
        return Err(format!("'{}' is not an NQN such as nqn.2026-11.com.example:models", nqn.escape_debug()));
    }
    Ok(())
}

/// The bytes of a UUID.
pub(crate) fn uuid(text: &str) -> Option<[u8; 16]> {
    let digits: Vec<u8> = text.bytes().filter(|byte| *byte != b'-').collect();
    if digits.len() != 32 {
        return None;
    }
    let mut out = [0; 16];
    for (byte, pair) in out.iter_mut().zip(digits.chunks(2)) {
        let digit = |i: usize| char::from(*pair.get(i)?).to_digit(16);
        *byte = (digit(0)? << 4 | digit(1)?) as u8;
    }
    Some(out)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parsed(text: &str) -> SubsystemAddress {
        text.parse().unwrap_or_else(|error| panic!("{text}: {error}"))
    }

    #[test]
    fn names_are_taken_apart_and_shown_again() {
        let one = parsed("nvme-tcp://store.example:4421/nqn.2026-11.x:models");
        assert_eq!((one.host.as_str(), one.port), ("store.example", 4421));
        assert_eq!(one.nqn.as_deref(), Some("nqn.2026-11.x:models"));
        assert_eq!(one.to_string(), "nvme-tcp://store.example:4421/nqn.2026-11.x:models");
        let six = parsed("nvme-tcp://[fe80::1]/nqn.2026-11.x:m?digests=all&keepalive=5&reconnect=0");
        assert_eq!(
            (six.host.as_str(), six.port, six.digests),
            ("fe80::1", 4420, Digests { header: true, data: true })
        );
        assert_eq!((six.keep_alive, six.reconnect), (Duration::from_secs(5), Duration::ZERO));
        assert_eq!(six.to_string(), "nvme-tcp://[fe80::1]:4420/nqn.2026-11.x:m");
        let discovery = parsed("nvme-tcp://10.0.0.1");
        assert_eq!((discovery.port, discovery.subsystem()), (8009, DISCOVERY_NQN));
        let id =
            parsed("nvme-tcp://a/nqn.x?hostid=6f6e6568-6f70-4000-8000-0000000000ff&hostnqn=nqn.h").host_id;
        assert_eq!(id.map(|id| (id[0], id[15])), Some((0x6f, 0xff)));
    }

    #[test]
    fn invalid_names_are_refused_with_the_reason() {
        let long = format!("nvme-tcp://a/nqn.{}", "x".repeat(MAX_NQN));
        for (text, why) in [
            ("nvme-rdma://a/nqn.x", "the form is"),
            ("nvme-tcp://", "no host"),
            ("nvme-tcp:///nqn.x", "no host"),
            ("nvme-tcp://a:0/nqn.x", "1 to 65535"),
            ("nvme-tcp://a:65536/nqn.x", "1 to 65535"),
            ("nvme-tcp://a:+1/nqn.x", "brackets"),
            ("nvme-tcp://fe80::1/nqn.x", "brackets"),
            ("nvme-tcp://[fe80::1/nqn.x", "closing"),
            ("nvme-tcp://[a]/nqn.x", "IPv6"),
            ("nvme-tcp://a/models", "not an NQN"),
            ("nvme-tcp://a/nqn.x y", "not an NQN"),
            ("nvme-tcp://a/nqn.x?digests=some", "header, data or all"),
            ("nvme-tcp://a/nqn.x?keepalive=0", "1 to 3600"),
            ("nvme-tcp://a/nqn.x?hostid=12", "UUID"),
            ("nvme-tcp://a/nqn.x?tls=required", "no option 'tls'"),
            (long.as_str(), "at most 223"),
        ] {
            let error =
                text.parse::<SubsystemAddress>().map(|target| target.to_string()).unwrap_err().to_string();
            assert!(error.contains(why), "{text}: {error}");
        }
    }
}
