//! A GPU and another device: the path between them, and whether it forwards transfers in each direction.

use onehop_pci::{Address, Device, Link, Path, PathClass};

use crate::facts::Facts;
use crate::facts::gpu::GpuFacts;
use crate::facts::vm::Virtual;

/// Intel server host bridges that the kernel's P2PDMA trusts, even between two of them.
const INTEL_TRUSTED: [u16; 6] = [0x2030, 0x2031, 0x2032, 0x2033, 0x2020, 0x09a2];
/// Intel host bridges that it trusts only if both devices are below the same one.
const INTEL_SAME_BRIDGE: [u16; 4] = [0x3c00, 0x3c01, 0x2f00, 0x2f01];
const INTEL: u16 = 0x8086;
/// The first CPU family of AMD's Zen.
const ZEN: u32 = 0x17;

/// A GPU and another device.
pub struct DevicePair<'a> {
    /// The machine.
    pub facts: &'a Facts,
    /// The GPU.
    pub gpu: &'a GpuFacts,
    /// The GPU's device.
    pub gpu_device: &'a Device,
    /// The other device.
    pub device: &'a Device,
    /// The path from the other device to the GPU.
    pub path: Option<Path>,
}

/// Whether transfers between the two devices get through.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Passes {
    /// The topology or the kernel's list says so.
    Expected(String),
    /// It works on some similar machines.
    Perhaps(String),
    /// Transfers were lost on similar machines.
    Doubtful(String),
}

impl<'a> DevicePair<'a> {
    /// Pairs a GPU and another device of the same machine.
    pub fn new(facts: &'a Facts, gpu: &'a GpuFacts, device: Address) -> Option<Self> {
        let (gpu_device, device) = (facts.device(gpu.address)?, facts.device(device)?);
        let path = facts.tree.path(device.address, gpu.address);
        Some(Self { facts, gpu, gpu_device, device, path })
    }

    /// The narrowest link on the path: bytes per second, the link, and its device. `None` if links set no limit.
    pub fn narrowest(&self) -> Option<(f64, Link, Address)> {
        let path = self.path.as_ref()?;
        if self.why_unlimited().is_some() {
            return None;
        }
        let ends = [self.device.address, self.gpu_device.address];
        let links = path.up.iter().chain(&path.down).chain(&ends).filter_map(|address| {
            let link = self.active_link(*address)?;
            Some((link.rate()?, link, *address))
        });
        links.min_by(|a, b| a.0.total_cmp(&b.0))
    }

    /// A device's link in its active state: an idle GPU lowers the speed at both ends of its link.
    fn active_link(&self, address: Address) -> Option<Link> {
        let link = self.facts.link(self.facts.device(address)?);
        let ends = [Some(self.gpu_device.address), self.gpu_device.parents.last().copied()];
        let speed = if ends.contains(&Some(address)) { link.max_speed.or(link.speed) } else { link.speed };
        Some(Link { speed, ..link })
    }

    /// Why the links on the path set no limit, and the source.
    pub fn why_unlimited(&self) -> Option<(String, &str)> {
        if let Virtual::Yes(by) = &self.facts.machine {
            let why = "a virtual machine's ports may not show the real links";
            return Some((why.into(), by));
        }
        [self.device, self.gpu_device].into_iter().find_map(|end| {
            let (why, by) = self.facts.why_link_sets_no_limit(end)?;
            Some((format!("{} is {why}", end.address), by))
        })
    }

    /// Devices on the path whose links are unknown.
    pub fn unknown_links(&self) -> Vec<Address> {
        let ends = [self.device, self.gpu_device];
        ends.iter().filter(|end| self.facts.link(end).rate().is_none()).map(|end| end.address).collect()
    }

    /// Ports on the path whose ACS redirects packets to the root complex, and ports whose ACS could not be read.
    pub fn redirecting(&self) -> (Vec<Address>, Vec<Address>) {
        let Some(path) = &self.path else { return Default::default() };
        let ports = self.facts.tree.access_control(path);
        let pick = |wanted: fn(&Option<onehop_pci::Acs>) -> bool| {
            ports.iter().filter(|(_, acs)| wanted(acs)).map(|(port, _)| *port).collect()
        };
        (pick(|acs| acs.is_some_and(|acs| acs.redirects())), pick(Option::is_none))
    }

    /// Whether writes get through: posted packets, which more machines forward than reads.
    pub fn writes(&self) -> Passes {
        self.passes(true)
    }

    /// Whether reads get through.
    pub fn reads(&self) -> Passes {
        self.passes(false)
    }

    fn passes(&self, write: bool) -> Passes {
        let Some(path) = &self.path else {
            return Passes::Perhaps("the path between the two is unknown".into());
        };
        match self.facts.machine {
            Virtual::No(_) => {}
            Virtual::Yes(_) => {
                let why = "this is a virtual machine: its topology is not the real one, and its host decides";
                return Passes::Perhaps(why.into());
            }
            Virtual::Unknown => {
                let why = "this may be a virtual machine (place.vm), which does not show the real topology";
                return Passes::Perhaps(why.into());
            }
        }
        if path.class.below_root() {
            let (redirect, unknown) = self.redirecting();
            if redirect.is_empty() && unknown.is_empty() {
                return Passes::Expected("a PCIe switch forwards it below the root complex".into());
            }
            if redirect.is_empty() {
                return Passes::Perhaps(format!(
                    "a switch forwards it, unless access control at {} redirects it to the root complex (run as root to check)",
                    list(&unknown)
                ));
            }
        }
        self.root_complex(path, write)
    }

    /// Whether the CPU's root complex forwards packets from one device to another.
    fn root_complex(&self, path: &Path, write: bool) -> Passes {
        let cpu = &self.facts.kernel.cpu;
        let name = if cpu.name.is_empty() { "this CPU" } else { &cpu.name };
        let far = matches!(path.class, PathClass::Node | PathClass::Sys);
        let amd = cpu.vendor == "AuthenticAMD" && cpu.family >= ZEN;
        let server = ["EPYC", "Threadripper", "Xeon"].iter().any(|name| cpu.name.contains(name))
            && !is_desktop_epyc(&cpu.name);
        if (amd && server) || self.trusted_intel(path) {
            if path.class == PathClass::Sys {
                return Passes::Perhaps(format!(
                    "{name} forwards it and the kernel trusts it to, but between sockets this is slow and did not work \
                     everywhere"
                ));
            }
            return Passes::Expected(format!("the kernel's P2PDMA trusts the root complex of {name}"));
        }
        match (amd, far, write) {
            (true, false, true) => Passes::Perhaps(
                "AMD desktop root complexes were seen to forward writes between ports; the kernel trusts them".into(),
            ),
            (true, false, false) => Passes::Doubtful(
                "AMD desktop root complexes were seen to drop reads between ports (all ones, and the link lost at worst)".into(),
            ),
            (false, false, true) if cpu.vendor == "GenuineIntel" && !server => {
                Passes::Perhaps("Intel client root complexes were seen to forward writes".into())
            }
            (false, false, false) if cpu.vendor == "GenuineIntel" && !server => {
                Passes::Doubtful("Intel client root complexes were seen to forward writes only".into())
            }
            _ => Passes::Perhaps(
                "the kernel's P2PDMA does not list this root complex, and no result for one is known".into(),
            ),
        }
    }

    /// Whether the kernel's list contains this machine's host bridge.
    fn trusted_intel(&self, path: &Path) -> bool {
        // The kernel checks function 00.0 of the host bridge's first bus.
        let bridge = |device: &Device| {
            let bus = u8::from_str_radix(device.host.rsplit_once(':')?.1, 16).ok()?;
            let domain =
                u32::from_str_radix(device.host.strip_prefix("pci")?.rsplit_once(':')?.0, 16).ok()?;
            self.facts.device(Address { domain, bus, device: 0, function: 0 })
        };
        let known = |list: &[u16], device: &Device| {
            bridge(device).is_some_and(|root| root.vendor == INTEL && list.contains(&root.device))
        };
        let same = !matches!(path.class, PathClass::Node | PathClass::Sys);
        let both = |list: &[u16]| known(list, self.device) && known(list, self.gpu_device);
        both(&INTEL_TRUSTED) || (same && both(&INTEL_SAME_BRIDGE))
    }
}

/// Whether a CPU is an EPYC 4004 or 4005, which has a desktop die and root complex.
fn is_desktop_epyc(name: &str) -> bool {
    let number = |word: &str| word.len() >= 4 && word.as_bytes()[..4].iter().all(u8::is_ascii_digit);
    name.contains("EPYC") && name.split(' ').any(|word| word.starts_with('4') && number(word))
}

/// Formats addresses as part of a sentence.
pub fn list(addresses: &[Address]) -> String {
    addresses.iter().map(ToString::to_string).collect::<Vec<_>>().join(", ")
}
