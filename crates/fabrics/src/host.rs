//! This host's identity towards targets.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use crate::name::{check_nqn, uuid};
use crate::{ChapSecret, Error, Result, SubsystemAddress};

/// Where Linux keeps the host's NQN and identifier.
const NQN_FILE: &str = "/etc/nvme/hostnqn";
const ID_FILE: &str = "/etc/nvme/hostid";
/// Returns a new UUID at each read.
const NEW_UUID: &str = "/proc/sys/kernel/random/uuid";

/// The secrets of host and target.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Secrets {
    /// The host's.
    pub host: Option<ChapSecret>,
    /// The target's.
    pub target: Option<ChapSecret>,
}

/// A host's NQN and identifier.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Host {
    /// The NQN, by which a target controls access.
    pub nqn: String,
    /// The identifier. All connections of a host have the same.
    pub id: [u8; 16],
    /// Its secret, and its target's.
    pub secrets: Secrets,
}

impl Host {
    /// The host for a target's name. What the name omits is this machine's, or generated if it has none.
    ///
    /// # Errors
    /// When no UUID is available, or a secret's file cannot be used.
    pub fn of(target: &SubsystemAddress) -> Result<Self> {
        let of_file = || line(NQN_FILE).filter(|nqn| !nqn.is_empty() && check_nqn(nqn).is_ok());
        let named = target.host_nqn.clone().or_else(of_file);
        // Targets may require that a name always has the same identifier, and most names end in one.
        let of_name = || uuid(named.as_deref()?.rsplit_once("uuid:")?.1);
        let id = target.host_id.or_else(|| uuid(&line(ID_FILE)?)).or_else(of_name);
        let fresh = if id.is_some() { None } else { Some(new_uuid()?) };
        let id = id.or_else(|| fresh.as_deref().and_then(uuid)).unwrap_or_default();
        let nqn = named.unwrap_or_else(|| format!("nqn.2014-08.org.nvmexpress:uuid:{}", hyphens(&id)));
        let secret = |file: &Option<PathBuf>| file.as_deref().map(ChapSecret::read).transpose();
        let secrets = Secrets { host: secret(&target.secret)?, target: secret(&target.target_secret)? };
        Ok(Self { nqn, id, secrets })
    }
}

fn line(path: &str) -> Option<String> {
    let text = std::fs::read_to_string(Path::new(path)).ok()?;
    Some(text.trim().to_owned())
}

fn new_uuid() -> Result<String> {
    let failed = |source| Error::Host { what: format!("read {NEW_UUID}"), source: Arc::new(source) };
    Ok(std::fs::read_to_string(NEW_UUID).map_err(failed)?.trim().to_owned())
}

/// A UUID in its usual form, with hyphens.
fn hyphens(id: &[u8; 16]) -> String {
    let mut out = String::new();
    for (i, byte) in id.iter().enumerate() {
        if [4, 6, 8, 10].contains(&i) {
            out.push('-');
        }
        out.push_str(&format!("{byte:02x}"));
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_host_is_the_named_one_or_a_new_one() {
        let target = |text: &str| text.parse::<SubsystemAddress>().unwrap();
        let id = "6f6e6568-6f70-4000-8000-0000000000ff";
        let named = Host::of(&target(&format!("nvme-tcp://a/nqn.x?hostnqn=nqn.h&hostid={id}"))).unwrap();
        assert_eq!((named.nqn.as_str(), hyphens(&named.id).as_str()), ("nqn.h", id));
        let other = Host::of(&target(&format!("nvme-tcp://a/nqn.x?hostid={id}"))).unwrap();
        assert!(other.nqn.starts_with("nqn."), "{}", other.nqn);
        let nqn = format!("nqn.2014-08.org.nvmexpress:uuid:{id}");
        let same = Host::of(&target(&format!("nvme-tcp://a/nqn.x?hostnqn={nqn}"))).unwrap();
        if !Path::new(ID_FILE).exists() {
            assert_eq!((same.nqn, hyphens(&same.id)), (nqn, id.to_owned()));
        }
        let new = Host::of(&target("nvme-tcp://a/nqn.x")).unwrap();
        assert_ne!(new.id, [0; 16]);
    }
}
