//! A PCI device, as described by its folder in sysfs.

use serde::Serialize;

use crate::bar::hex;
use crate::link::lanes;
use crate::names::Names;
use crate::{Address, Bar, BarKind, DeviceConfig, Error, Link, Result, Root, Speed, parse_resource};

/// The longest config space.
const MAX_CONFIG: usize = 4096;
/// Upper limit of bridges between the root and a device.
const MAX_DEPTH: usize = 32;
const DEVICES: &str = "/sys/bus/pci/devices";

/// The class code: base class, subclass, programming interface.
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

    /// The class in words.
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
    /// Its size in bytes.
    pub size: u64,
    /// Its free bytes.
    pub available: u64,
    /// Whether other drivers may find it.
    pub published: bool,
}

/// A PCI function. Unknown values are `None`; malformed ones are in `problems`.
#[derive(Clone, Debug, Serialize)]
pub struct Device {
    /// Its address.
    pub address: Address,
    /// The vendor's ID.
    pub vendor: u16,
    /// The device's ID.
    pub device: u16,
    /// Subsystem vendor and device ID.
    pub subsystem: Option<(u16, u16)>,
    /// Its class.
    pub class: Class,
    /// The vendor's name.
    pub vendor_name: Option<String>,
    /// The device's name.
    pub device_name: Option<String>,
    /// Its memory and registers.
    pub bars: Vec<Bar>,
    /// Its link, from sysfs.
    pub link: Link,
    /// Its config space; `None` if it was not read.
    pub config: Option<DeviceConfig>,
    /// `D0` … `D3cold`, as the kernel reports it.
    pub power_state: Option<String>,
    /// Runtime power management status, such as `suspended`.
    pub runtime_status: Option<String>,
    /// `on` or `auto`: whether the kernel may suspend it.
    pub power_control: Option<String>,
    /// Whether its power may be cut (D3cold).
    pub d3cold_allowed: Option<bool>,
    /// The bound kernel driver.
    pub driver: Option<String>,
    /// The driver that it is reserved for.
    pub driver_override: Option<String>,
    /// The kernel's enable count; 0 if disabled.
    pub enabled: Option<u32>,
    /// Reset methods, as the kernel lists them.
    pub reset_methods: Option<String>,
    /// Address bits that its driver declared for DMA.
    pub dma_bits: Option<u32>,
    /// Its IOMMU group.
    pub iommu_group: Option<u32>,
    /// Its NUMA node.
    pub numa_node: Option<u32>,
    /// Whether the firmware used it for the boot screen.
    pub boot_vga: bool,
    /// Memory for other devices.
    pub p2pmem: Option<PeerMemory>,
    /// The device of which it is a virtual function.
    pub physical_function: Option<Address>,
    /// Its host bridge, such as `pci0000:00`.
    pub host: String,
    /// The bridges above it, from the root down.
    pub parents: Vec<Address>,
    /// Whether it is behind a host bridge that is a device itself (Intel VMD).
    pub behind_vmd: bool,
    /// Whether it is behind a cable (Thunderbolt, USB4), as the firmware reports.
    pub behind_cable: bool,
    /// Malformed values, and values that this user may not read.
    pub problems: Vec<Error>,
}

impl Device {
    /// Reads a device.
    ///
    /// # Errors
    /// When its IDs cannot be read.
    pub(crate) fn read(root: &Root, address: Address, names: &Names) -> Result<Self> {
        let folder = format!("{DEVICES}/{address}");
        let mut reader = DeviceReader { root, folder: &folder, problems: Vec::new() };
        let vendor = reader.id("vendor")?;
        let id = reader.id("device")?;
        let class = Class(reader.number("class")? as u32 & 0xff_ffff);
        let (host, parents, behind_vmd) = reader.bridges_above(address);
        let runtime_status = reader.word("power/runtime_status");
        let asleep = runtime_status.as_deref() == Some("suspended");
        let mut device = Self {
            address,
            vendor,
            device: id,
            subsystem: reader.id("subsystem_vendor").ok().zip(reader.id("subsystem_device").ok()),
            class,
            vendor_name: names.vendor(root, vendor),
            device_name: names.device(root, vendor, id),
            bars: reader.bars(),
            link: reader.link(),
            config: None,
            power_state: reader.word("power_state"),
            runtime_status,
            power_control: reader.word("power/control"),
            d3cold_allowed: reader.word("d3cold_allowed").map(|word| word == "1"),
            driver: root.link_name(&format!("{folder}/driver")),
            driver_override: reader.word("driver_override").filter(|word| word != "(null)"),
            enabled: reader.parsed("enable", "count"),
            reset_methods: reader.word("reset_method"),
            dma_bits: reader.parsed("dma_mask_bits", "number of bits"),
            iommu_group: root.link_name(&format!("{folder}/iommu_group")).and_then(|name| name.parse().ok()),
            numa_node: reader.parsed("numa_node", "NUMA node").and_then(|node: i64| u32::try_from(node).ok()),
            boot_vga: reader.word("boot_vga").is_some_and(|word| word == "1"),
            p2pmem: reader.p2pmem(),
            physical_function: root.link_name(&format!("{folder}/physfn")).and_then(|name| name.parse().ok()),
            host,
            parents,
            behind_vmd,
            behind_cable: reader.word("removable").is_some_and(|word| word == "removable"),
            problems: Vec::new(),
        };
        // Reading a suspended device's config space would wake it. Performance monitors are numerous and irrelevant.
        if !asleep && !matches!(class.base(), 0x08) && class.kind() != 0x1101 {
            device.config = reader.config();
        }
        device.problems = reader.problems;
        Ok(device)
    }

    /// Its name, or its IDs.
    #[must_use]
    pub fn title(&self) -> String {
        let vendor = self.vendor_name.clone().unwrap_or_else(|| format!("{:04x}", self.vendor));
        match &self.device_name {
            Some(name) => format!("{vendor} {name}"),
            None => format!("{vendor} {} {:04x}:{:04x}", self.class.name(), self.vendor, self.device),
        }
    }

    /// Its link from sysfs, otherwise from config space.
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

    /// Its largest memory BAR.
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

    /// Whether it is suspended; its registers then read as ones.
    #[must_use]
    pub fn is_asleep(&self) -> bool {
        let by_kernel = self.power_state.as_deref().is_some_and(|state| state.starts_with("D3"));
        let by_itself = self.config.as_ref().and_then(|c| c.power).is_some_and(|power| power.state == 3);
        by_kernel || by_itself || self.runtime_status.as_deref() == Some("suspended")
    }
}

/// A device's folder, and the problems found in it.
struct DeviceReader<'a> {
    root: &'a Root,
    folder: &'a str,
    problems: Vec<Error>,
}

impl DeviceReader<'_> {
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

    /// The contents of a file; `None` if it is missing or empty.
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

    fn config(&mut self) -> Option<DeviceConfig> {
        let path = format!("{}/config", self.folder);
        let found = self.root.bytes(&path, MAX_CONFIG);
        let bytes = self.keep(found)?;
        let config = DeviceConfig::parse(&bytes);
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

    /// The host bridge and the bridges above the device, from its link in sysfs.
    fn bridges_above(&mut self, address: Address) -> (String, Vec<Address>, bool) {
        let found = self.root.link(self.folder);
        let Some(target) = self.keep(found) else { return (String::new(), Vec::new(), false) };
        let parts: Vec<&str> = target.split('/').collect();
        let hosts = || parts.iter().filter(|part| is_host(part));
        let mut bridges_above: Vec<Address> = parts.iter().filter_map(|part| part.parse().ok()).collect();
        let twice = bridges_above.iter().enumerate().any(|(at, one)| bridges_above[..at].contains(one));
        if bridges_above.pop() != Some(address) || twice || bridges_above.len() > MAX_DEPTH {
            self.problems.push(Error::garbage(self.folder, &target, "path from the root to this device"));
            return (String::new(), Vec::new(), false);
        }
        (
            hosts().next().map_or_else(String::new, |host| (*host).to_owned()),
            bridges_above,
            hosts().count() > 1,
        )
    }
}

/// Whether it is a host bridge's folder, such as `pci0000:00`.
fn is_host(part: &str) -> bool {
    let rest = part.strip_prefix("pci").and_then(|rest| rest.split_once(':'));
    let digits = |part: &str| !part.is_empty() && part.bytes().all(|b| b.is_ascii_hexdigit());
    rest.is_some_and(|(domain, bus)| digits(domain) && digits(bus))
}
