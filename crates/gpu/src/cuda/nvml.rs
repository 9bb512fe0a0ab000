//! What NVIDIA's management library reports about a GPU: link and power. Loaded on first use; CUDA is not needed.

use std::ffi::{CString, OsStr, c_char, c_int, c_uint, c_void};

use libloading::Library;

use crate::{Error, Result};

/// Its soname, and where drivers install it.
const PLACES: [&str; 2] = ["libnvidia-ml.so.1", "/usr/lib/x86_64-linux-gnu/libnvidia-ml.so.1"];

type NvmlDevice = *mut c_void;
// SAFETY: a type and no call.
type Number = unsafe extern "C" fn(NvmlDevice, *mut c_uint) -> c_int;

/// The library, started.
pub struct Nvml(Library);

/// NVML's report about a GPU. Unknown values are `None`.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct GpuHealth {
    /// The link's generation of PCIe now: an idle GPU slows it.
    pub link_generation: Option<u32>,
    /// The link's lanes now.
    pub link_lanes: Option<u32>,
    /// The best generation that GPU and slot both support.
    pub max_link_generation: Option<u32>,
    /// The most lanes that both support.
    pub max_link_lanes: Option<u32>,
    /// Present power in milliwatts.
    pub power: Option<u32>,
    /// Power limit in milliwatts.
    pub power_limit: Option<u32>,
    /// Its performance state: 0 is at work, 8 and more idle.
    pub state: Option<u32>,
    /// Whether it is divided into instances (MIG).
    pub mig: Option<bool>,
}

fn function<F: Copy>(library: &Library, name: &str) -> Result<F> {
    // SAFETY: the symbol is a C function of NVML, and every caller asks for its documented signature.
    let symbol = unsafe { library.get::<F>(name.as_bytes()) };
    symbol.map(|symbol| *symbol).map_err(|_| refused(format!("it has no {name}")))
}

fn refused(why: String) -> Error {
    Error::NotSupported { what: "asking NVML".into(), why }
}

impl Nvml {
    /// Finds and starts it.
    ///
    /// # Errors
    /// When there is no working library; the error says why.
    pub fn load() -> Result<Self> {
        Self::load_from(&PLACES.map(OsStr::new))
    }

    fn load_from(places: &[&OsStr]) -> Result<Self> {
        let mut why = String::new();
        for place in places {
            // SAFETY: NVML's initialisers only set up NVML itself.
            match unsafe { Library::new(*place) } {
                Ok(library) => return Self::start(library),
                Err(error) if why.is_empty() => why = super::loader_words(&error),
                Err(_) => {}
            }
        }
        Err(refused(format!("there is no libnvidia-ml.so.1 ({why}); it comes with NVIDIA's driver")))
    }

    fn start(library: Library) -> Result<Self> {
        // SAFETY: a type and no call; nvml.h says that it takes nothing.
        let init: unsafe extern "C" fn() -> c_int = function(&library, "nvmlInit_v2")?;
        // SAFETY: it takes nothing; it is undone when the result is dropped. On failure there is nothing to undo: NVML
        // counts its users, and an extra shutdown would be another library's.
        match unsafe { init() } {
            0 => Ok(Self(library)),
            code => Err(refused(format!("nvmlInit_v2 failed with {code}{}", hint(code)))),
        }
    }

    fn function<F: Copy>(&self, name: &str) -> Result<F> {
        function(&self.0, name)
    }

    fn device(&self, pci: &str) -> Result<NvmlDevice> {
        // SAFETY: a type and no call, of nvml.h's signature.
        let get: unsafe extern "C" fn(*const c_char, *mut NvmlDevice) -> c_int =
            self.function("nvmlDeviceGetHandleByPciBusId_v2")?;
        let name = CString::new(pci)
            .map_err(|_| refused(format!("'{}' is not a PCI address", pci.escape_debug())))?;
        let mut device = std::ptr::null_mut();
        // SAFETY: the name ends in a zero byte, and `device` lives across the call.
        match unsafe { get(name.as_ptr(), &mut device) } {
            0 => Ok(device),
            code => Err(refused(format!("it does not know {pci} (error {code}{})", hint(code)))),
        }
    }

    /// The bytes of BAR 1 of the GPU at a PCI address: through it other devices reach its memory.
    ///
    /// # Errors
    /// When it knows no such GPU, or does not report it.
    pub fn bar_bytes(&self, pci: &str) -> Result<u64> {
        // SAFETY: a type and no call, of nvml.h's signature: the result is bytes in all, free and used.
        let get: unsafe extern "C" fn(NvmlDevice, *mut [u64; 3]) -> c_int =
            self.function("nvmlDeviceGetBAR1MemoryInfo")?;
        let (device, mut bytes) = (self.device(pci)?, [0; 3]);
        // SAFETY: the device is NVML's own, and `bytes` lives across the call.
        match unsafe { get(device, &mut bytes) } {
            0 if bytes[0] > 0 => Ok(bytes[0]),
            code => Err(refused(format!("it does not report the size of BAR 1 of {pci} (error {code})"))),
        }
    }

    /// NVML's description of the GPU at a PCI address.
    ///
    /// # Errors
    /// When it knows no such GPU.
    pub fn health(&self, pci: &str) -> Result<GpuHealth> {
        let device = self.device(pci)?;
        let number = |name: &str| {
            let call: Number = self.function(name).ok()?;
            let mut value = 0;
            // SAFETY: the device is NVML's own, and `value` lives across the call.
            (unsafe { call(device, &mut value) } == 0).then_some(value)
        };
        Ok(GpuHealth {
            link_generation: number("nvmlDeviceGetCurrPcieLinkGeneration"),
            link_lanes: number("nvmlDeviceGetCurrPcieLinkWidth"),
            max_link_generation: number("nvmlDeviceGetMaxPcieLinkGeneration"),
            max_link_lanes: number("nvmlDeviceGetMaxPcieLinkWidth"),
            power: number("nvmlDeviceGetPowerUsage"),
            power_limit: number("nvmlDeviceGetEnforcedPowerLimit"),
            state: number("nvmlDeviceGetPerformanceState").filter(|state| *state < 32),
            mig: self.mig(device),
        })
    }

    /// Indivisible GPUs and older libraries do not report it.
    fn mig(&self, device: NvmlDevice) -> Option<bool> {
        // SAFETY: a type and no call, of nvml.h's signature.
        let get: unsafe extern "C" fn(NvmlDevice, *mut c_uint, *mut c_uint) -> c_int =
            self.function("nvmlDeviceGetMigMode").ok()?;
        let (mut now, mut later) = (0, 0);
        // SAFETY: the device is NVML's own, and both numbers live across the call.
        (unsafe { get(device, &mut now, &mut later) } == 0).then_some(now == 1)
    }
}

/// Hints for some of its errors.
fn hint(code: c_int) -> &'static str {
    match code {
        9 => ": NVIDIA's kernel driver is not loaded",
        6 => ": there is no such GPU",
        18 => ": library and kernel driver are of different versions: reboot",
        _ => "",
    }
}

impl Drop for Nvml {
    fn drop(&mut self) {
        // SAFETY: a type and no call; nvml.h says that it takes nothing.
        if let Ok(end) = self.function::<unsafe extern "C" fn() -> c_int>("nvmlShutdown") {
            // SAFETY: it was started once, by `start`, and is ended once; no handle of it is left.
            let _ = unsafe { end() };
        }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use std::io::Write;
    use std::process::Command;

    use super::*;

    const MODEL: &str = r#"
        #include <string.h>
        typedef void *device;
        static int started, fails, ended;
        void fail(int on) { fails = on; }
        int ends(void) { return ended; }
        int nvmlInit_v2(void) { if (fails) return 9; started = 1; return 0; }
        int nvmlShutdown(void) { ended++; return started-- == 1 ? 0 : 1; }
        int nvmlDeviceGetHandleByPciBusId_v2(const char *pci, device *d) { *d = &started; return strcmp(pci, "0000:1b:00.0") ? 6 : 0; }
        int nvmlDeviceGetMaxPcieLinkGeneration(device d, unsigned *v) { *v = 5; return 0; }
        int nvmlDeviceGetMaxPcieLinkWidth(device d, unsigned *v) { *v = 16; return 0; }
        int nvmlDeviceGetPowerUsage(device d, unsigned *v) { *v = 75123; return 3; }
        int nvmlDeviceGetMigMode(device d, unsigned *now, unsigned *later) { *now = 1; *later = 0; return 0; }
        int nvmlDeviceGetBAR1MemoryInfo(device d, unsigned long long *v) { v[0] = 128ull << 30; v[1] = 1; v[2] = 2; return 0; }
        int nvmlDeviceGetPerformanceState(device d, unsigned *v) { *v = 32; return 0; }
    "#;

    #[test]
    fn unreported_values_are_none() {
        let folder = std::env::temp_dir().join(format!("onehop-nvml-{}", std::process::id()));
        std::fs::create_dir_all(&folder).unwrap();
        let (source, library) = (folder.join("model.c"), folder.join("libmodel.so"));
        std::fs::write(&source, MODEL).unwrap();
        let made = Command::new("cc").args(["-shared", "-fPIC", "-o"]).arg(&library).arg(&source).status();
        if !made.is_ok_and(|status| status.success()) {
            let _ = std::io::stderr().write_all(b"SKIPPED: a C compiler (cc) is not installed\n");
            return;
        }
        let nvml = Nvml::load_from(&[library.as_os_str()]).unwrap();
        let health = nvml.health("0000:1b:00.0").unwrap();
        let expected = GpuHealth {
            max_link_generation: Some(5),
            max_link_lanes: Some(16),
            mig: Some(true),
            ..GpuHealth::default()
        };
        assert_eq!(health, expected);
        assert_eq!(nvml.bar_bytes("0000:1b:00.0").unwrap(), 128 << 30);
        assert!(nvml.bar_bytes("0000:1c:00.0").is_err());
        assert!(nvml.health("0000:1c:00.0").unwrap_err().to_string().contains("no such GPU"));
        assert!(nvml.health("a\0b").is_err());
        // What did not start is not shut down: that would be another library's shutdown.
        // SAFETY: the model's functions, of these signatures.
        unsafe {
            let model = Library::new(&library).unwrap();
            let fail = model.get::<unsafe extern "C" fn(c_int)>(b"fail").unwrap();
            let ends = model.get::<unsafe extern "C" fn() -> c_int>(b"ends").unwrap();
            fail(1);
            let failed = Nvml::load_from(&[library.as_os_str()]).err().unwrap().to_string();
            assert!(failed.contains("failed with 9") && ends() == 0, "{failed}, ended {} times", ends());
            fail(0);
            drop(nvml);
            assert_eq!(ends(), 1);
        }
        std::fs::remove_dir_all(&folder).unwrap();
        assert!(
            Nvml::load_from(&[library.as_os_str()]).err().unwrap().to_string().contains("no libnvidia-ml")
        );
    }
}
