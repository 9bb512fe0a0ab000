//! An open port of an RDMA device: its address, and the memory registered with it.

use std::net::{IpAddr, Ipv6Addr};
use std::ops::Range;
use std::sync::Arc;

use onehop_os::HostMem;

use crate::cache::{Allocation, Cache, CacheCounters, CacheLimits, HeldRegistration, PAGE};
use crate::memory::{Access, MemoryRef, MemoryRoute, NewRegistration, RefusedRoute, RemoteMemory, register};
use crate::verbs::{Domain, Gid, GidKind, Registration, Verbs, VerbsDevice};
use crate::{Error, Result};

/// Host memory of programs is registered in ranges of this length, at multiples of it.
const WINDOW: u64 = 4 << 20;

/// Selects device, port and address; omitted ones are chosen.
#[derive(Clone, Debug, Default)]
pub struct Choice {
    /// The device: `mlx5_0`.
    pub device: String,
    /// Its port; by default the first that is up.
    pub port: Option<u8>,
    /// The index of the address in the port's table; by default one of RoCE v2, if possible of this IP address.
    pub gid: Option<u8>,
    /// An IP address of this machine that the port should have.
    pub ip: Option<IpAddr>,
}

impl Choice {
    /// Selects a device, and leaves the rest open.
    #[must_use]
    pub fn device(name: &str) -> Self {
        Self { device: name.to_owned(), ..Self::default() }
    }
}

/// An open port.
pub struct Nic {
    pub(crate) domain: Arc<Domain>,
    pub(crate) port: u8,
    pub(crate) mtu: i32,
    pub(crate) lid: u16,
    pub(crate) gid: Gid,
    pub(crate) reads: u8,
    /// The access to memory in the cache.
    access: Access,
    limits: CacheLimits,
    cache: Cache<Registered>,
}

/// Memory that the device reaches while this lives, and by which route.
pub struct Registered {
    registration: Arc<Registration>,
    addr: u64,
    len: u64,
    way: MemoryRoute,
    refusals: Vec<RefusedRoute>,
}

impl Registered {
    /// Its length in bytes.
    #[must_use]
    pub fn len(&self) -> u64 {
        self.len
    }

    /// Whether it has no bytes.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Its route.
    #[must_use]
    pub fn way(&self) -> MemoryRoute {
        self.way
    }

    /// The better routes that were refused, and why.
    #[must_use]
    pub fn why_not_better(&self) -> &[RefusedRoute] {
        &self.refusals
    }

    /// A part of it, as another machine addresses it.
    ///
    /// # Errors
    /// When the range does not lie within it.
    pub fn remote(&self, offset: u64, bytes: u64) -> Result<RemoteMemory> {
        let whole = RemoteMemory { addr: self.addr, len: self.len, rkey: self.registration.rkey };
        whole.part(offset, bytes)
    }

    /// Address and key by which the device itself accesses a part of it.
    pub(crate) fn local(&self, offset: u64, bytes: u64) -> Result<(u64, u32)> {
        Ok((self.remote(offset, bytes)?.addr, self.registration.lkey))
    }

    pub(crate) fn registration(&self) -> &Arc<Registration> {
        &self.registration
    }

    /// Whether the device may reach it permanently, because a connection that used it could not be destroyed.
    pub(crate) fn is_lost(&self) -> bool {
        self.registration.is_lost()
    }
}

impl std::fmt::Debug for Registered {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Registered({} bytes, {})", self.len, self.way.name())
    }
}

impl Nic {
    /// Opens a port.
    ///
    /// # Errors
    /// When there is no such device, no port of it is up, or none has an address.
    pub fn open(verbs: &Verbs, choice: &Choice, limits: CacheLimits) -> Result<Arc<Self>> {
        let device = Arc::new(verbs.open(&choice.device)?);
        let (reads, ports) = device.limits()?;
        let number = match choice.port {
            Some(port) => port,
            None => first_active(&device, ports)?,
        };
        let port = device.port(number)?;
        if !port.active {
            return Err(Error::none(format!("port {number} of {} is down: is its cable in?", choice.device)));
        }
        let gids = device.gids(number, port.gids);
        let chosen = choose(&gids, choice, port.ethernet);
        let gid = chosen.ok_or_else(|| {
            Error::none(format!("port {number} of {} has {}", choice.device, missing(choice)))
        })?;
        let domain = Arc::new(Domain::new(device)?);
        let (mtu, lid, access, cache) = (port.mtu, port.lid, Access::Own, Cache::new(limits));
        Ok(Arc::new(Self { domain, port: number, mtu, lid, gid, reads, access, limits, cache }))
    }

    /// The same port with a separate protection domain, to expose memory to one peer: [`Self::cached`] exposes what it
    /// registers. Only connections made with this one reach that memory.
    ///
    /// # Errors
    /// When the device cannot create another domain.
    pub fn for_exposing(&self) -> Result<Arc<Self>> {
        let domain = Arc::new(Domain::new(self.domain.device.clone())?);
        let (access, cache) = (Access::Exposed, Cache::new(self.limits));
        let Self { port, mtu, lid, gid, reads, limits, .. } = *self;
        Ok(Arc::new(Self { domain, port, mtu, lid, gid, reads, access, limits, cache }))
    }

    /// A port of a fake device.
    #[cfg(test)]
    pub(crate) fn of_device(device: VerbsDevice) -> Arc<Self> {
        let (access, limits) = (Access::Own, CacheLimits::default());
        let gid = Gid { index: 0, bytes: [1; 16], kind: GidKind::RoceV2 };
        let domain = Arc::new(Domain::new(Arc::new(device)).unwrap());
        let cache = Cache::new(limits);
        Arc::new(Self { domain, port: 1, mtu: 3, lid: 0, gid, reads: 1, access, limits, cache })
    }

    /// The device's name.
    #[must_use]
    pub fn name(&self) -> &str {
        self.domain.device.name()
    }

    /// The address of its port, for display: an IP address if it encodes one.
    #[must_use]
    pub fn address(&self) -> String {
        let address = Ipv6Addr::from(self.gid.bytes);
        address.to_ipv4_mapped().map_or_else(|| address.to_string(), |v4| v4.to_string())
    }

    /// Whether it has this IP address.
    #[must_use]
    pub fn has(&self, ip: IpAddr) -> bool {
        self.gid.bytes == bytes_of(ip)
    }

    /// Whether its port is up now.
    #[must_use]
    pub fn is_up(&self) -> bool {
        self.domain.device.port(self.port).is_ok_and(|port| port.active)
    }

    /// Registers memory by the best route that works, for as long as the result lives.
    ///
    /// # Errors
    /// When no route works; the error has the reason for each. When it is to be exposed, and a connection of this port
    /// could not be destroyed.
    pub fn register(&self, memory: &MemoryRef, access: Access) -> Result<Registered> {
        self.ensure_exposes(access)?;
        let NewRegistration { region, addr, way, refusals } =
            register(&self.domain, self.name(), memory, access)?;
        let len = memory.bytes() as u64;
        Ok(Registered { registration: Arc::new(region), addr, len, way, refusals })
    }

    fn ensure_exposes(&self, access: Access) -> Result<()> {
        if access == Access::Exposed && self.domain.has_lost_exposed() {
            return Err(Error::none(format!(
                "{} did not destroy a connection that has ended, and exposes no more memory: mount again",
                self.name()
            )));
        }
        Ok(())
    }

    /// Registered host memory of the crate's own; nothing reads it while it is written.
    pub(crate) fn host(&self, bytes: usize) -> Result<(HostMem, Registered)> {
        let mem = HostMem::anonymous(bytes)?;
        let memory: MemoryRef = Arc::new(mem.clone());
        Ok((mem, self.register(&memory, Access::Messages)?))
    }

    /// A registration of a range of an allocation of `len` bytes: from the cache, or a new one of the memory that
    /// `slice` returns for whole pages around the range.
    ///
    /// # Errors
    /// When the range does not lie within the allocation, or the memory cannot be registered: see [`Self::register`].
    pub fn cached(
        &self,
        allocation: Allocation,
        len: u64,
        range: Range<u64>,
        slice: impl FnOnce(Range<u64>) -> Result<MemoryRef>,
    ) -> Result<HeldRegistration<Registered>> {
        // Cached registrations are not exposed for another use either.
        self.ensure_exposes(self.access)?;
        self.cache.get(allocation, len, range, |pages| self.register(&slice(pages)?, self.access))
    }

    /// The same for all of some memory. Its address serves as its number: a registration holds the memory, so no other
    /// memory can have that address.
    ///
    /// # Errors
    /// When it cannot be registered.
    pub fn cached_whole(&self, memory: &MemoryRef) -> Result<HeldRegistration<Registered>> {
        let len = memory.bytes() as u64;
        self.cached(Allocation::by_address(memory), len, 0..len, |_| Ok(memory.clone()))
    }

    /// A registration that covers a range of some memory, whose place there is [`HeldRegistration::offset`].
    ///
    /// Registering host memory pins its pages, and makes those that do not exist yet. A program may have terabytes of memory
    /// without pages. So where a page near the range is missing, only the pages of the range are registered: the transfer
    /// needs those anyway. GPU memory exists, and is registered as a whole.
    ///
    /// # Errors
    /// When the range does not lie within the memory, or it cannot be registered.
    pub fn cached_part(&self, memory: &MemoryRef, range: Range<u64>) -> Result<HeldRegistration<Registered>> {
        let len = memory.bytes() as u64;
        if range.start >= range.end || range.end > len {
            let bytes = range.end.saturating_sub(range.start);
            return Err(Error::OutOfRange { offset: range.start, bytes, len });
        }
        let Some(mem) = memory.host() else {
            return Ok(self.cached_whole(memory)?.further(range.start));
        };
        self.ensure_exposes(self.access)?;
        let allocation = Allocation::by_address(memory);
        if let Some(held) = self.cache.existing(allocation, &range) {
            return Ok(held);
        }
        let near = range.start / WINDOW * WINDOW..range.end.next_multiple_of(WINDOW).min(len);
        let pages = range.start / PAGE * PAGE..range.end.next_multiple_of(PAGE).min(len);
        let part = |range: &Range<u64>| range.start as usize..range.end as usize;
        let chosen = if mem.is_resident(part(&near)) { near } else { pages };
        let further = range.start - chosen.start;
        let slice = |pages| Ok(Arc::new(mem.slice(part(&pages))?) as MemoryRef);
        Ok(self.cached(allocation, len, chosen, slice)?.further(further))
    }

    /// Forgets memory; what [`Self::cached_whole`] or [`Self::cached_part`] registered is released by its last user.
    pub fn forget_whole(&self, memory: &MemoryRef) {
        self.forget(Allocation::by_address(memory));
    }

    /// An allocation is freed: see [`Cache::forget`].
    pub fn forget(&self, allocation: Allocation) {
        self.cache.forget(allocation);
    }

    /// Counters of the registration cache.
    #[must_use]
    pub fn account(&self) -> CacheCounters {
        self.cache.account()
    }
}

fn first_active(device: &VerbsDevice, ports: u8) -> Result<u8> {
    let up = |number: &u8| device.port(*number).is_ok_and(|port| port.active);
    (1..=ports).find(up).ok_or_else(|| {
        Error::none(format!("none of the {ports} ports of {} is up: is its cable in?", device.name()))
    })
}

/// The address to use: the requested one; otherwise RoCE v2 before v1, and an IPv4 address before others, because
/// networks route those.
fn choose(gids: &[Gid], choice: &Choice, ethernet: bool) -> Option<Gid> {
    if let Some(index) = choice.gid {
        return gids.iter().find(|gid| gid.index == index).copied();
    }
    if !ethernet {
        return gids.first().copied();
    }
    let wanted = choice.ip.map(bytes_of);
    let rank = |gid: &&Gid| {
        let address = Ipv6Addr::from(gid.bytes);
        (
            wanted != Some(gid.bytes),
            gid.kind != GidKind::RoceV2,
            address.to_ipv4_mapped().is_none(),
            address.is_unicast_link_local(),
            gid.index,
        )
    };
    gids.iter().min_by_key(rank).copied()
}

fn missing(choice: &Choice) -> String {
    match choice.gid {
        Some(index) => format!("no address number {index}"),
        None => "no address: give its network interface one".into(),
    }
}

fn bytes_of(ip: IpAddr) -> [u8; 16] {
    match ip {
        IpAddr::V4(v4) => v4.to_ipv6_mapped().octets(),
        IpAddr::V6(v6) => v6.octets(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn gid(index: u8, address: &str, kind: GidKind) -> Gid {
        Gid { index, bytes: bytes_of(address.parse().unwrap()), kind }
    }

    #[test]
    fn the_address_is_one_that_networks_route() {
        let table = [
            gid(0, "fe80::1", GidKind::RoceV1),
            gid(1, "fe80::1", GidKind::RoceV2),
            gid(2, "10.9.0.1", GidKind::RoceV1),
            gid(3, "10.9.0.1", GidKind::RoceV2),
            gid(5, "2001:db8::1", GidKind::RoceV2),
            gid(6, "10.10.0.1", GidKind::RoceV2),
        ];
        let any = Choice::default();
        let index = |gids: &[Gid], choice: &Choice| choose(gids, choice, true).map(|gid| gid.index);
        assert_eq!(index(&table, &any), Some(3));
        assert_eq!(index(&table[..2], &any), Some(1));
        assert_eq!(index(&table[..1], &any), Some(0));
        assert_eq!(index(&[table[4], table[1]], &any), Some(5));
        assert_eq!(index(&[], &any), None);
        let second = Choice { ip: Some("10.10.0.1".parse().unwrap()), ..Choice::default() };
        assert_eq!(index(&table, &second), Some(6));
        let by_number = Choice { gid: Some(2), ..Choice::default() };
        assert_eq!(index(&table, &by_number), Some(2));
        assert_eq!(index(&table, &Choice { gid: Some(4), ..Choice::default() }), None);
        // On InfiniBand, the first is the port's own.
        assert_eq!(choose(&table, &any, false).map(|gid| gid.index), Some(0));
    }
}
