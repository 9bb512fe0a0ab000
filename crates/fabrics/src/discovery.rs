//! Discovery: a target's subsystems, and their addresses.

use std::sync::Arc;
use std::time::{Duration, Instant};

use onehop_os::{HostMem, StopSignal};
use onehop_proto::admin::get_log_page;
use onehop_proto::fabrics::{DISCOVERY_LOG, DiscoveryEntry, DiscoveryLog};
use onehop_proto::regs::Cc;

use crate::association::Association;
use crate::connect::left;
use crate::{Error, Host, Result, SubsystemAddress};

/// Maximum number of entries read.
const MAX_ENTRIES: u64 = 4096;
/// Time limit of a whole discovery.
const LIMIT: Duration = Duration::from_secs(30);
/// How often a log that changes meanwhile is read again.
const TRIES: u32 = 5;
/// Bytes of an entry, and of the log's header.
const ENTRY: usize = 1024;

/// A subsystem, and one path to it.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Subsystem {
    /// Its NQN.
    pub nqn: String,
    /// The transport: `tcp`, `rdma`, `fc`, `loop`.
    pub transport: &'static str,
    /// The address, in the transport's form.
    pub address: String,
    /// The service: a port of TCP or RDMA.
    pub service: String,
    /// Whether it is a discovery service.
    pub is_discovery: bool,
    /// Whether it requires secure channels.
    pub needs_tls: bool,
}

/// Queries a target's discovery service; `stop` ends the query.
///
/// # Errors
/// When it cannot be reached, or answers incorrectly.
pub fn discover(target: &SubsystemAddress, stop: &StopSignal) -> Result<Vec<Subsystem>> {
    let target = SubsystemAddress { nqn: None, ..target.clone() };
    let host = Host::of(&target)?;
    let (start, target) = (Instant::now(), Arc::new(target));
    let association = Association::connect(target.clone(), Arc::new(host), 0, stop.clone())?;
    let due = start + LIMIT;
    association.enable(Cc::enabled(12, Cc::CSS_NVM), Some(due))?;
    for _ in 0..TRIES {
        let before = read(&association, 0, due)?;
        let head = DiscoveryLog::new(&before);
        if head.recfmt() != 0 {
            return Err(Error::Unsupported(format!("its discovery log has format {}", head.recfmt())));
        }
        let count = head.numrec();
        if count > MAX_ENTRIES {
            let what = format!("its discovery log has {count} entries, and at most {MAX_ENTRIES} are read");
            return Err(Error::Unsupported(what));
        }
        let entry = |index| {
            if stop.is_set() {
                return Err(Error::Interrupted);
            }
            if left(due).is_zero() {
                let what = "all of the discovery log";
                return Err(Error::Silent { queue: target.to_string(), what, waited: LIMIT });
            }
            read(&association, index * ENTRY as u64, due)
        };
        let entries = (1..=count).map(entry).collect::<Result<Vec<_>>>()?;
        // Entries of different versions of the log must not be mixed.
        if DiscoveryLog::new(&read(&association, 0, due)?).genctr() == head.genctr() {
            return Ok(entries.iter().map(subsystem).collect());
        }
    }
    Err(Error::Unsupported("its discovery log changes all the time".into()))
}

fn read(association: &Association, at: u64, due: Instant) -> Result<[u8; ENTRY]> {
    let memory = HostMem::anonymous(ENTRY)?;
    let sqe = get_log_page(DISCOVERY_LOG, 0, ENTRY as u32, at, false, 0);
    association.read("Get Log Page (discovery)", &sqe, &memory, ENTRY as u32, due)?;
    let mut entry = [0; ENTRY];
    memory.read(0, &mut entry)?;
    Ok(entry)
}

fn subsystem(entry: &[u8; ENTRY]) -> Subsystem {
    let view = DiscoveryEntry::new(entry);
    Subsystem {
        nqn: view.subnqn().to_string(),
        transport: view.transport(),
        address: view.traddr().to_string(),
        service: view.trsvcid().to_string(),
        is_discovery: view.subtype() != DiscoveryEntry::NVM,
        needs_tls: view.treq() & 3 == 1,
    }
}
