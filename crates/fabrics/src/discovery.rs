//! Discovery: which subsystems a target has, and where.

use std::sync::Arc;
use std::time::{Duration, Instant};

use onehop_os::{HostMem, StopSignal};
use onehop_proto::admin::get_log_page;
use onehop_proto::fabrics::{DISCOVERY_LOG, DiscoveryEntry, DiscoveryLog};
use onehop_proto::regs::Cc;

use crate::association::Association;
use crate::{Error, Host, Result, SubsystemAddress};

/// Most entries that are read.
const MAX_ENTRIES: u64 = 4096;
/// How long all of it may take.
const LIMIT: Duration = Duration::from_secs(30);
/// How often a log that changes while it is read is read again.
const TRIES: u32 = 5;
/// Bytes of an entry, and of the log's head.
const ENTRY: usize = 1024;

/// A subsystem, and one way to it.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Subsystem {
    /// Its NQN.
    pub nqn: String,
    /// The transport: `tcp`, `rdma`, `fc`, `loop`.
    pub transport: &'static str,
    /// The address, as the transport writes it.
    pub address: String,
    /// The service: a port of TCP or RDMA.
    pub service: String,
    /// Whether it is a discovery service.
    pub is_discovery: bool,
    /// Whether only secure channels are let in.
    pub needs_tls: bool,
}

/// Asks the discovery service of a target; `stop` ends that.
///
/// # Errors
/// When it cannot be reached, or does not answer as it should.
pub fn discover(target: &SubsystemAddress, stop: &StopSignal) -> Result<Vec<Subsystem>> {
    let target = SubsystemAddress { nqn: None, ..target.clone() };
    let host = Host::of(&target)?;
    let (start, target) = (Instant::now(), Arc::new(target));
    let association = Association::connect(target.clone(), Arc::new(host), stop.clone())?;
    association.enable(Cc::enabled(12, Cc::CSS_NVM))?;
    for _ in 0..TRIES {
        let before = read(&association, 0)?;
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
            if start.elapsed() > LIMIT {
                let what = "all of the discovery log";
                return Err(Error::Silent { queue: target.to_string(), what, waited: LIMIT });
            }
            read(&association, index * ENTRY as u64)
        };
        let entries = (1..=count).map(entry).collect::<Result<Vec<_>>>()?;
        // Entries of two versions of the log do not belong together.
        if DiscoveryLog::new(&read(&association, 0)?).genctr() == head.genctr() {
            return Ok(entries.iter().map(subsystem).collect());
        }
    }
    Err(Error::Unsupported("its discovery log changes all the time".into()))
}

fn read(association: &Association, at: u64) -> Result<[u8; ENTRY]> {
    let memory = HostMem::anonymous(ENTRY)?;
    let sqe = get_log_page(DISCOVERY_LOG, 0, ENTRY as u32, at, false, 0);
    association.read("Get Log Page (discovery)", &sqe, &memory, ENTRY as u32)?;
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
