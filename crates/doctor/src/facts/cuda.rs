//! What CUDA reports, and trials on each GPU: a context, a copy that is read back and compared, a dma-buf.

use std::sync::{Arc, mpsc};
use std::thread;
use std::time::Duration;

use onehop_gpu::cuda::{self, DeviceKind, Span, WritesOrdering};
use onehop_gpu::{Gpu, Place, Rows};
use onehop_os::MmioWindow;
use onehop_pci::{Address, Root};
use serde::{Deserialize, Serialize};

/// Bytes copied or exported by a trial.
const TRIAL_BYTES: usize = 2 << 20;

/// The result of a trial, with the reason if it failed.
pub type Trial = Result<(), String>;

/// What the CUDA driver reports.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Cuda {
    /// Why CUDA cannot be used.
    pub error: Option<String>,
    /// Its CUDA version: 1000 × major + 10 × minor.
    pub version: i32,
    /// The GPUs in its order.
    pub gpus: Vec<CudaGpu>,
}

/// CUDA's view of a GPU.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct CudaGpu {
    /// Its PCI address.
    pub pci: String,
    /// Its product name.
    pub name: String,
    /// Its memory size in bytes.
    pub memory: u64,
    /// Compute capability.
    pub compute: (i32, i32),
    /// Whether CUDA reports that other devices may access its memory.
    pub gpudirect: bool,
    /// Whether CUDA reports support for dma-bufs.
    #[serde(rename = "dma_buf_said")]
    pub dma_buf_reported: bool,
    /// Scope of the ordering of other devices' writes: `none`, `owner`, `all`.
    pub ordering: String,
    /// Whether the host can flush them.
    pub host_flush: bool,
    /// The result of opening it and copying 2 MiB from pinned memory to it and back.
    pub copy: Option<Trial>,
    /// The result of exporting 2 MiB as a dma-buf.
    pub dma_buf: Option<Trial>,
    /// The result of mapping the first page of a drive's registers.
    #[serde(default)]
    pub registers: Option<Registers>,
}

/// The result of mapping a drive's registers for a GPU.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Registers {
    /// The drive.
    #[serde(rename = "of")]
    pub drive: String,
    /// The result.
    #[serde(rename = "tried")]
    pub trial: Trial,
}

impl Cuda {
    fn failed(why: impl ToString) -> Self {
        Self { error: Some(why.to_string()), ..Self::default() }
    }
}

/// Start of the message after a timeout.
pub(crate) const TIMED_OUT: &str = "no answer within";

/// Queries CUDA and tries each GPU, with a time limit: a hanging driver must not block the doctor.
///
/// `registers` is a drive whose registers are mapped for each GPU. Only its capability register (CAP) is read; nothing
/// is written.
pub(super) fn query(timeout: Duration, registers: Option<Address>) -> Cuda {
    let (sender, answer) = mpsc::channel();
    let thread = thread::Builder::new().name("cuda".into()).spawn(move || sender.send(query_all(registers)));
    if let Err(error) = thread {
        return Cuda::failed(format!("cannot start a thread to query it: {error}"));
    }
    answer.recv_timeout(timeout).unwrap_or_else(|_| {
        Cuda::failed(format!(
            "{TIMED_OUT} {} ms: it may be starting (nvidia-persistenced keeps it ready) or hanging",
            timeout.as_millis()
        ))
    })
}

fn query_all(registers: Option<Address>) -> Cuda {
    let cuda = match cuda::Cuda::load() {
        Ok(cuda) => cuda,
        Err(error) => return Cuda::failed(error),
    };
    let devices = match cuda.devices() {
        Ok(devices) => devices,
        Err(error) => return Cuda { version: cuda.version(), ..Cuda::failed(error) },
    };
    // Opening a GPU takes a fifth of a second, so all are opened in parallel.
    let gpus = thread::scope(|scope| {
        let threads: Vec<_> =
            devices.iter().map(|device| scope.spawn(|| try_gpu(&cuda, device, registers))).collect();
        threads
            .into_iter()
            .zip(&devices)
            .map(|(thread, device)| thread.join().unwrap_or_else(|_| attributes(device)))
            .collect()
    });
    Cuda { error: None, version: cuda.version(), gpus }
}

/// What CUDA reports about a GPU, without trials.
fn attributes(device: &cuda::Device) -> CudaGpu {
    let ordering = match device.can.visibility.ordering {
        WritesOrdering::None => "none",
        WritesOrdering::Owner => "owner",
        WritesOrdering::AllDevices => "all",
    };
    CudaGpu {
        pci: device.pci.clone(),
        name: device.name.clone(),
        memory: device.memory,
        compute: device.can.compute,
        gpudirect: device.can.gpudirect,
        dma_buf_reported: device.can.dma_buf,
        ordering: ordering.into(),
        host_flush: device.can.visibility.host_flush,
        copy: None,
        dma_buf: None,
        registers: None,
    }
}

fn try_gpu(cuda: &cuda::Cuda, device: &cuda::Device, registers: Option<Address>) -> CudaGpu {
    let mut facts = attributes(device);
    match cuda.open(&device.ordinal.to_string()) {
        Err(error) => facts.copy = Some(Err(error.to_string())),
        Ok(gpu) => {
            facts.copy = Some(try_copy(&gpu));
            facts.dma_buf = Some(try_dma_buf(&gpu).map_err(|error| error.to_string()));
            facts.registers = registers.and_then(|drive| try_registers(&gpu, drive));
        }
    }
    facts
}

fn try_copy(gpu: &cuda::CudaGpu) -> Trial {
    let bytes: Vec<u8> = (0..TRIAL_BYTES as u32).map(|i| (i.wrapping_mul(0x9e37_79b1) >> 24) as u8).collect();
    let back = round_trip(gpu, &bytes).map_err(|error| error.to_string())?;
    match bytes.iter().zip(&back).position(|(sent, got)| sent != got) {
        None => Ok(()),
        Some(at) => Err(format!("byte {at} of {TRIAL_BYTES} came back different from GPU memory")),
    }
}

/// Copies bytes to GPU memory by the copy engine, and reads them back.
fn round_trip(gpu: &cuda::CudaGpu, bytes: &[u8]) -> onehop_gpu::Result<Vec<u8>> {
    let (host, vram) = (gpu.alloc(Place::PinnedHost, bytes.len())?, gpu.alloc(Place::Vram, bytes.len())?);
    host.write(0, bytes)?;
    let mut copier = gpu.copier(&host, &vram)?;
    copier.copy(&Rows { from: 0, to: 0, row: bytes.len(), rows: 1, step: bytes.len() })?;
    let mark = copier.mark()?;
    copier.wait(mark)?;
    let mut back = vec![0; bytes.len()];
    vram.read(0, &mut back)?;
    Ok(back)
}

fn try_dma_buf(gpu: &cuda::CudaGpu) -> onehop_gpu::Result<()> {
    let memory = gpu.alloc_device(DeviceKind::Exportable, TRIAL_BYTES)?;
    gpu.export_dma_buf(&memory, Span::Allocation, false).map(drop)
}

/// The first page of a BAR0, for reading only.
struct FirstPage(MmioWindow);

impl onehop_os::Registers for FirstPage {
    fn read32(&self, offset: u32) -> u32 {
        self.0.read32(offset)
    }

    fn write32(&self, _: u32, _: u32) {}

    fn size(&self) -> u32 {
        self.0.memory().len() as u32
    }

    fn mmio(&self) -> Option<MmioWindow> {
        Some(self.0.clone())
    }
}

/// Maps the first page of a drive's registers for the GPU; `None` if the kernel forbids mapping it.
fn try_registers(gpu: &cuda::CudaGpu, drive: Address) -> Option<Registers> {
    let bar = onehop_pci::bar_memory(&Root::here(), drive, Some(0)).ok()?;
    let page = FirstPage(MmioWindow::new(bar.slice(0..4096).ok()?));
    let trial = gpu.map_registers(Arc::new(page)).map(drop).map_err(|error| error.to_string());
    Some(Registers { drive: drive.to_string(), trial })
}
