//! One device: everything that its folder in sysfs tells.

use serde::Serialize;

use crate::bar::hex;
use crate::link::lanes;
use crate::names::Names;
use crate::{Address, Bar, BarKind, Config, Error, Link, Result, Root, Speed, parse_resource};

/// The longest config space.
const MAX_CONFIG: usize = 4096;
/// The longest way from the root that is believed.
const MAX_DEPTH: usize = 32;
/// Where the devices are.
const DEVICES: &str = "/sys/bus/pci/devices";

/// What kind of device it is: base class, subclass, programming interface.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Class(pub u32);

impl Class {
    /// The base class.
    #[must_use]
    pub fn base(self) -> u8 {
        (self.0 >> 16) as u8
    }

    /// Base class and subclass.
    #[must_use]
    pub fn kind(self) -> u16 {
        (self.0 >> 8) as u16
    }

    /// What people call it.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self.kind() {
            0x0108 => "NVMe controller",
            0x0100..=0x01ff => "storage controller",
            0x0200 => "Ethernet controller",
            0x0207 => "InfiniBand controller",
            0x0201..=0x02ff => "network controller",
            0x0300 => "VGA controller",
            0x0302 => "3D controller",
            0x0301..=0x03ff => "display controller",
            0x0400..=0x04ff => "multimedia device",
            0x0500..=0x05ff => "memory controller",
            0x0600 => "host bridge",
            0x0604 => "PCI bridge",
            0x0601..=0x06ff => "bridge",
            0x0c03 => "USB controller",
            0x0d00..=0x0dff => "wireless controller",
            0x1180..=0x11ff => "signal processing controller",
            0x1200..=0x12ff => "processing accelerator",
            _ => "device",
        }
    }
}

impl Serialize for Class {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> std::result::Result<S::Ok, S::Error> {
        serializer.collect_str(&format_args!("{:#08x}", self.0))
    }
}

/// Memory that a driver offers to other devices (`p2pmem`).
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize)]
pub struct PeerMemory {
    /// Bytes.
    pub size: u64,
    /// Bytes that are free.
    pub available: u64,
    /// Whether other drivers may find it.
    pub published: bool,
}

/// A PCI function. What is none is not told; what was told and is wrong is in `problems`.
#[derive(Clone, Debug, Serialize)]
pub struct Device {
    /// Where it is.
    pub address: Address,
    /// The vendor's number.
    pub vendor: u16,
    /// The device's number.
    pub device: u16,
    /// The board maker's numbers.
    pub subsystem: Option<(u16, u16)>,
    /// What kind it is.
    pub class: Class,
    /// The vendor's name.
    pub vendor_name: Option<String>,
    /// The device's name.
    pub device_name: Option<String>,
    /// Where its memory and registers are.
    pub bars: Vec<Bar>,
    /// Its link, by sysfs.
    pub link: Link,
    /// Its config space; none where it was not read.
    pub config: Option<Config>,
    /// `D0` … `D3cold`, as the kernel has it.
    pub power_state: Option<String>,
    /// Whether it sleeps to save power (`suspended`).
    pub runtime_status: Option<String>,
    /// `on` or `auto`: whether the kernel may put it to sleep.
    pub power_control: Option<String>,
    /// Whether it may lose its power altogether.
    pub d3cold_allowed: Option<bool>,
    /// The kernel driver that has it.
    pub driver: Option<String>,
    /// The driver that somebody reserved it for.
    pub driver_override: Option<String>,
    /// Whether its memory is switched on: a count, or 0.
    pub enabled: Option<u32>,
    /// Ways of resetting it, as the kernel lists them.
    pub reset_methods: Option<String>,
    /// How many bits of bus address its driver said that it has.
    pub dma_bits: Option<u32>,
    /// Its IOMMU group.
    pub iommu_group: Option<u32>,
    /// Its NUMA node.
    pub numa_node: Option<u32>,
    /// Whether the firmware drew its screen on it.
    pub boot_vga: bool,
    /// Memory for other devices.
    pub p2pmem: Option<PeerMemory>,
    /// The device that it is a virtual function of.
    pub physical_function: Option<Address>,
    /// The host bridge that it hangs from: `pci0000:00`.
    pub host: String,
    /// The bridges on the way to it, from the root down.
    pub parents: Vec<Address>,
    /// Whether a host bridge that is a device itself (Intel VMD) lies on the way.
    pub behind_vmd: bool,
    /// Whether it hangs behind a cable (Thunderbolt, USB4): the firmware marks such ports.
    pub behind_cable: bool,
    /// What was told and is wrong, or may not be read by this user.
    pub problems: Vec<Error>,
}

impl Device {
    /// Reads one.
    ///
    /// # Errors
    /// When it does not even say which device it is.
    pub(crate) fn read(root: &Root, address: Address, names: &Names) -> Result<Self> {
        let folder = format!("{DEVICES}/{address}");
        let mut look = Look { root, folder: &folder, problems: Vec::new() };
        let vendor = look.id("vendor")?;
        let id = look.id("device")?;
        let class = Class(look.number("class")? as u32 & 0xff_ffff);
        let (host, parents, behind_vmd) = look.way(address);
        let runtime_status = look.word("power/runtime_status");
        let asleep = runtime_status.as_deref() == Some("suspended");
        let mut device = Self {
            address,
            vendor,
            device: id,
            subsystem: look.id("subsystem_vendor").ok().zip(look.id("subsystem_device").ok()),
            class,
            vendor_name: names.vendor(root, vendor),
            device_name: names.device(root, vendor, id),
            bars: look.bars(),
            link: look.link(),
            config: None,
            power_state: look.word("power_state"),
            runtime_status,
            power_control: look.word("power/control"),
            d3cold_allowed: look.word("d3cold_allowed").map(|word| word == "1"),
            driver: root.link_name(&format!("{folder}/driver")),
            driver_override: look.word("driver_override").filter(|word| word != "(null)"),
            enabled: look.parsed("enable", "count"),
            reset_methods: look.word("reset_method"),
            dma_bits: look.parsed("dma_mask_bits", "number of bits"),
            iommu_group: root.link_name(&format!("{folder}/iommu_group")).and_then(|name| name.parse().ok()),
            numa_node: look.parsed("numa_node", "NUMA node").and_then(|node: i64| u32::try_from(node).ok()),
            boot_vga: look.word("boot_vga").is_some_and(|word| word == "1"),
            p2pmem: look.p2pmem(),
            physical_function: root.link_name(&format!("{folder}/physfn")).and_then(|name| name.parse().ok()),
            host,
            parents,
            behind_vmd,
            behind_cable: look.word("removable").is_some_and(|word| word == "removable"),
            problems: Vec::new(),
        };
        // Reading a sleeping device's config space would wake it; perfmon devices are many and tell nothing.
        if !asleep && !matches!(class.base(), 0x08) && class.kind() != 0x1101 {
            device.config = look.config();
        }
        device.problems = look.problems;
        Ok(device)
    }

    /// What people call it: its name, or its numbers.
    #[must_use]
    pub fn title(&self) -> String {
        let vendor = self.vendor_name.clone().unwrap_or_else(|| format!("{:04x}", self.vendor));
        match &self.device_name {
            Some(name) => format!("{vendor} {name}"),
            None => format!("{vendor} {} {:04x}:{:04x}", self.class.name(), self.vendor, self.device),
        }
    }

    /// Its link, by sysfs or else by its config space.
    #[must_use]
    pub fn best_link(&self) -> Link {
        let other = self.config.as_ref().and_then(|c| c.express).map(|e| e.link).unwrap_or_default();
        Link {
            speed: self.link.speed.or(other.speed),
            width: self.link.width.or(other.width),
            max_speed: self.link.max_speed.or(other.max_speed),
            max_width: self.link.max_width.or(other.max_width),
        }
    }

    /// Its largest BAR of memory.
    #[must_use]
    pub fn largest_bar(&self) -> Option<&Bar> {
        self.bars.iter().filter(|bar| bar.kind == BarKind::Memory).max_by_key(|bar| bar.size)
    }

    /// A BAR by its number.
    #[must_use]
    pub fn bar(&self, index: usize) -> Option<&Bar> {
        self.bars.iter().find(|bar| bar.index == index)
    }

    /// Whether it is a bridge.
    #[must_use]
    pub fn is_bridge(&self) -> bool {
        self.class.kind() == 0x0604
    }

    /// Whether it is not awake: its registers read as ones then.
    #[must_use]
    pub fn is_asleep(&self) -> bool {
        let by_kernel = self.power_state.as_deref().is_some_and(|state| state.starts_with("D3"));
        let by_itself = self.config.as_ref().and_then(|c| c.power).is_some_and(|power| power.state == 3);
        by_kernel || by_itself || self.runtime_status.as_deref() == Some("suspended")
    }
}

/// A device's folder, and what was wrong in it.
struct Look<'a> {
    root: &'a Root,
    folder: &'a str,
    problems: Vec<Error>,
}

impl Look<'_> {
    fn text(&self, name: &str) -> Result<String> {
        self.root.text(&format!("{}/{name}", self.folder))
    }

    fn number(&self, name: &str) -> Result<u64> {
        let text = self.text(name)?;
        hex(&text).ok_or_else(|| {
            Error::garbage(&format!("{}/{name}", self.folder), &text, "hexadecimal number after 0x")
        })
    }

    fn id(&self, name: &str) -> Result<u16> {
        let number = self.number(name)?;
        u16::try_from(number).map_err(|_| {
            Error::garbage(&format!("{}/{name}", self.folder), &format!("{number:#x}"), "number of 16 bits")
        })
    }

    /// What a file says, if it says anything.
    fn word(&mut self, name: &str) -> Option<String> {
        let found = self.text(name);
        self.keep(found).filter(|word| !word.is_empty())
    }

    fn parsed<T: std::str::FromStr>(&mut self, name: &str, wanted: &'static str) -> Option<T> {
        let word = self.word(name)?;
        let path = format!("{}/{name}", self.folder);
        self.keep(word.parse().map_err(|_| Error::garbage(&path, &word, wanted)))
    }

    fn keep<T>(&mut self, found: Result<T>) -> Option<T> {
        match found {
            Ok(found) => Some(found),
            Err(error) => {
                if !error.is_missing() {
                    self.problems.push(error);
                }
                None
            }
        }
    }

    fn bars(&mut self) -> Vec<Bar> {
        let path = format!("{}/resource", self.folder);
        let found = self.root.text(&path).and_then(|text| parse_resource(&path, &text));
        self.keep(found).unwrap_or_default()
    }

    fn link(&mut self) -> Link {
        let mut speed = |name: &str| self.word(name).and_then(|text| Speed::parse(&text));
        let (now, best) = (speed("current_link_speed"), speed("max_link_speed"));
        let mut width = |name: &str| self.word(name).and_then(|text| lanes(&text));
        Link {
            speed: now,
            width: width("current_link_width"),
            max_speed: best,
            max_width: width("max_link_width"),
        }
    }

    fn p2pmem(&mut self) -> Option<PeerMemory> {
        let size = self.parsed("p2pmem/size", "number of bytes")?;
        Some(PeerMemory {
            size,
            available: self.parsed("p2pmem/available", "number of bytes").unwrap_or(0),
            published: self.word("p2pmem/published").is_some_and(|word| word == "1"),
        })
    }

    fn config(&mut self) -> Option<Config> {
        let path = format!("{}/config", self.folder);
        let found = self.root.bytes(&path, MAX_CONFIG);
        let bytes = self.keep(found)?;
        let config = Config::parse(&bytes);
        match &config {
            None => self.problems.push(Error::garbage(&path, "all ones, or nothing", "config space")),
            Some(config) if config.broken_list => {
                self.problems.push(Error::garbage(
                    &path,
                    "a list that leads nowhere",
                    "list of capabilities",
                ));
            }
            Some(_) => {}
        }
        config
    }

    /// The host bridge and the bridges on the way, by where the device's link leads.
    fn way(&mut self, address: Address) -> (String, Vec<Address>, bool) {
        let found = self.root.link(self.folder);
        let Some(target) = self.keep(found) else { return (String::new(), Vec::new(), false) };
        let parts: Vec<&str> = target.split('/').collect();
        let hosts = || parts.iter().filter(|part| is_host(part));
        let mut way: Vec<Address> = parts.iter().filter_map(|part| part.parse().ok()).collect();
        let twice = way.iter().enumerate().any(|(at, one)| way[..at].contains(one));
        if way.pop() != Some(address) || twice || way.len() > MAX_DEPTH {
            self.problems.push(Error::garbage(self.folder, &target, "way from the root to this device"));
            return (String::new(), Vec::new(), false);
        }
        (hosts().next().map_or_else(String::new, |host| (*host).to_owned()), way, hosts().count() > 1)
    }
}

/// `pci0000:00`, a host bridge's folder.
fn is_host(part: &str) -> bool {
    let rest = part.strip_prefix("pci").and_then(|rest| rest.split_once(':'));
    let digits = |part: &str| !part.is_empty() && part.bytes().all(|b| b.is_ascii_hexdigit());
    rest.is_some_and(|(domain, bus)| digits(domain) && digits(bus))
}
