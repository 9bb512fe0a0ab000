//! Composes machines for tests, device by device, as records.
#![allow(dead_code)]

use onehop_pci::{Content, Record};

/// A machine under construction.
pub struct Machine(pub Record);

/// A PCI function under construction.
#[derive(Clone)]
pub struct Function {
    address: String,
    host: String,
    parents: Vec<String>,
    ids: (u16, u16),
    class: u32,
    bars: [(u64, u64, u64); 7],
    config: Option<Vec<u8>>,
    extended_end: usize,
    files: Vec<(String, String)>,
    links: Vec<(String, String)>,
    group: Option<(u32, String)>,
}

/// Flags of BARs, as the kernel defines them.
pub const MEM32: u64 = 0x40200;
pub const MEM64: u64 = 0x140204;
pub const PREF64: u64 = 0x14220c;

/// Port types, as PCI Express numbers them.
pub const ENDPOINT: u16 = 0;
pub const ROOT_PORT: u16 = 4;
pub const UPSTREAM: u16 = 5;
pub const DOWNSTREAM: u16 = 6;

/// Request redirect, completion redirect, upstream forwarding, source validation.
pub const ACS_ON: u16 = 0x1d;

const DEVICES: &str = "/sys/bus/pci/devices";

impl Machine {
    pub fn new(about: &str) -> Self {
        let mut record = Record::new();
        record.about = format!("composed: {about}");
        record.composed = true;
        Self(record)
    }

    pub fn file(&mut self, path: &str, text: &str) -> &mut Self {
        self.0.files.insert(path.into(), Content::Text(text.into()));
        self
    }

    pub fn denied(&mut self, path: &str) -> &mut Self {
        self.0.files.insert(path.into(), Content::Denied { denied: true });
        self
    }

    pub fn there(&mut self, path: &str) -> &mut Self {
        self.0.files.insert(path.into(), Content::There { there: true });
        self
    }

    pub fn link(&mut self, path: &str, target: &str) -> &mut Self {
        self.0.links.insert(path.into(), target.into());
        self
    }

    pub fn folder(&mut self, path: &str, names: &[&str]) -> &mut Self {
        self.0.folders.insert(path.into(), names.iter().map(|name| (*name).into()).collect());
        self
    }

    pub fn answer(&mut self, question: &str, value: serde_json::Value) -> &mut Self {
        self.0.answers.insert(question.into(), value);
        self
    }

    pub fn add(&mut self, function: &Function) -> &mut Self {
        let folder = format!("{DEVICES}/{}", function.address);
        let mut way = format!("../../../devices/{}", function.host);
        for part in function.parents.iter().chain([&function.address]) {
            way = format!("{way}/{part}");
        }
        self.link(&folder, &way);
        self.file(&format!("{folder}/vendor"), &format!("0x{:04x}\n", function.ids.0));
        self.file(&format!("{folder}/device"), &format!("0x{:04x}\n", function.ids.1));
        self.file(&format!("{folder}/class"), &format!("{:#08x}\n", function.class));
        let rows: Vec<_> =
            function.bars.iter().map(|(start, size, flags)| row(*start, *size, *flags)).collect();
        self.file(&format!("{folder}/resource"), &rows.concat());
        if let Some(config) = &function.config {
            self.0.files.insert(format!("{folder}/config"), Content::from_bytes(config));
        }
        for (name, text) in &function.files {
            self.file(&format!("{folder}/{name}"), text);
        }
        for (name, target) in &function.links {
            self.link(&format!("{folder}/{name}"), target);
        }
        if let Some((number, kind)) = &function.group {
            self.link(&format!("{folder}/iommu_group"), &format!("../../../../kernel/iommu_groups/{number}"));
            let path = format!("/sys/kernel/iommu_groups/{number}/type");
            self.file(&path, &format!("{kind}\n"));
        }
        self
    }
}

fn row(start: u64, size: u64, flags: u64) -> String {
    let end = if size == 0 { 0 } else { start + size - 1 };
    format!("{start:#018x} {end:#018x} {flags:#018x}\n")
}

impl Function {
    /// A device directly below the host bridge `pci0000:00`.
    pub fn new(address: &str, ids: (u16, u16), class: u32) -> Self {
        let mut config = vec![0_u8; 4096];
        config[0..2].copy_from_slice(&ids.0.to_le_bytes());
        config[2..4].copy_from_slice(&ids.1.to_le_bytes());
        config[4] = 6;
        config[6] = 0x10;
        config[0x34] = 0x40;
        // Power management, then PCI Express.
        config[0x40..0x42].copy_from_slice(&[0x01, 0x60]);
        config[0x60] = 0x10;
        config[0x67] = 0x10;
        Self {
            address: address.into(),
            host: "pci0000:00".into(),
            parents: Vec::new(),
            ids,
            class,
            bars: [(0, 0, 0); 7],
            config: Some(config),
            extended_end: 0,
            files: vec![("power_state".into(), "D0\n".into()), ("numa_node".into(), "-1\n".into())],
            links: Vec::new(),
            group: None,
        }
    }

    /// A bridge of this port type.
    pub fn port(address: &str, ids: (u16, u16), kind: u16) -> Self {
        let mut port = Self::new(address, ids, 0x060400);
        port.half(0x62, kind << 4 | 2);
        if let Some(config) = &mut port.config {
            config[0xe] = 1;
        }
        port
    }

    pub fn host(mut self, host: &str) -> Self {
        self.host = host.into();
        self
    }

    pub fn under(mut self, parents: &[&str]) -> Self {
        self.parents = parents.iter().map(|part| (*part).into()).collect();
        self
    }

    pub fn bar(mut self, index: usize, start: u64, size: u64, flags: u64) -> Self {
        self.bars[index] = (start, size, flags);
        self
    }

    /// Generation and lanes, present and maximum.
    pub fn lanes(self, now: (u16, u16), best: (u16, u16)) -> Self {
        const WORDS: [&str; 6] = ["2.5", "5.0", "8.0", "16.0", "32.0", "64.0"];
        let words = |generation: u16| format!("{} GT/s PCIe\n", WORDS[usize::from(generation) - 1]);
        let mut this = self
            .with("current_link_speed", &words(now.0))
            .with("current_link_width", &format!("{}\n", now.1))
            .with("max_link_speed", &words(best.0))
            .with("max_link_width", &format!("{}\n", best.1));
        this.half(0x6c, best.0 | best.1 << 4);
        this.half(0x72, now.0 | now.1 << 4);
        this
    }

    pub fn driver(mut self, name: &str) -> Self {
        self.links.push(("driver".into(), format!("../../../../bus/pci/drivers/{name}")));
        self
    }

    /// Adds a link to its folder.
    pub fn linked(mut self, name: &str, target: &str) -> Self {
        self.links.push((name.into(), target.into()));
        self
    }

    pub fn group(mut self, number: u32, kind: &str) -> Self {
        self.group = Some((number, kind.into()));
        self
    }

    pub fn node(self, node: i32) -> Self {
        self.with("numa_node", &format!("{node}\n"))
    }

    /// Adds a file to its folder, replacing one of the same name.
    pub fn with(mut self, name: &str, text: &str) -> Self {
        self.files.push((name.into(), text.into()));
        self
    }

    pub fn without(mut self, name: &str) -> Self {
        self.files.retain(|file| file.0 != name);
        self
    }

    /// Adds ACS with these enabled controls.
    pub fn acs(mut self, control: u16) -> Self {
        let at = self.extended(0x0d, 8);
        self.half(at + 4, 0x5f);
        self.half(at + 6, control);
        self
    }

    /// Adds a resizable BAR: log2 of its present, smallest and largest size.
    pub fn resizable(mut self, bar: u16, now: u32, smallest: u32, largest: u32) -> Self {
        let at = self.extended(0x15, 12);
        let sizes = (smallest..=largest).fold(0_u32, |all, bit| all | 1 << (bit - 20 + 4));
        self.half(at + 4, sizes as u16);
        self.half(at + 6, (sizes >> 16) as u16);
        self.half(at + 8, bar | 1 << 5 | ((now - 20) as u16) << 8);
        self
    }

    /// Truncates its config space to the 64 bytes that users other than root see.
    pub fn unprivileged(mut self) -> Self {
        if let Some(config) = &mut self.config {
            config.truncate(64);
        }
        self
    }

    /// Suspended, like a laptop's GPU.
    pub fn asleep(self) -> Self {
        let mut this = self.with("power_state", "D3cold\n").with("power/runtime_status", "suspended\n");
        this.config = None;
        this
    }

    pub fn raw_config(mut self, bytes: Vec<u8>) -> Self {
        self.config = Some(bytes);
        self
    }

    fn half(&mut self, at: usize, value: u16) {
        if let Some(config) = &mut self.config {
            config[at..at + 2].copy_from_slice(&value.to_le_bytes());
        }
    }

    /// Adds room for another extended capability.
    fn extended(&mut self, id: u16, bytes: usize) -> usize {
        let at = if self.extended_end == 0 { 0x100 } else { self.extended_end };
        if self.extended_end != 0 {
            // The one before leads here.
            let before = self.last_extended();
            self.half(before + 2, 1 | (at as u16) << 4);
        }
        self.half(at, id);
        self.half(at + 2, 1);
        self.extended_end = at + bytes.next_multiple_of(16);
        at
    }

    fn last_extended(&self) -> usize {
        let config = self.config.as_deref().unwrap_or_default();
        let mut at = 0x100;
        loop {
            let next = usize::from(u16::from_le_bytes([config[at + 2], config[at + 3]]) >> 4);
            if next == 0 {
                return at;
            }
            at = next;
        }
    }
}
