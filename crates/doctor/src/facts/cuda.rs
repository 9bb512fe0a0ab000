//! CUDA's answers. Each GPU is tried: a context, a copy whose bytes are compared, a dma-buf.

use std::sync::{Arc, mpsc};
use std::thread;
use std::time::Duration;

use onehop_gpu::cuda::{self, DeviceKind, Span, WritesOrdering};
use onehop_gpu::{Gpu, Place, Rows};
use onehop_os::MmioWindow;
use onehop_pci::{Address, Root};
use serde::{Deserialize, Serialize};

/// Size of the trials.
const TRIED: usize = 2 << 20;

/// The result of a trial, with the reason if it failed.
pub type Trial = Result<(), String>;

/// The CUDA driver's answer.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Cuda {
    /// Why there is no answer.
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
    /// Bytes of its memory.
    pub memory: u64,
    /// Compute capability.
    pub compute: (i32, i32),
    /// Whether CUDA reports that other devices may access its memory.
    pub gpudirect: bool,
    /// Whether CUDA reports support for dma-bufs.
    pub dma_buf_said: bool,
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
    pub of: String,
    /// The result.
    pub tried: Trial,
}

impl Cuda {
    fn failed(why: impl ToString) -> Self {
        Self { error: Some(why.to_string()), ..Self::default() }
    }
}

/// Start of the message after a timeout.
pub(crate) const LATE: &str = "no answer within";

/// Queries CUDA and tries each GPU, with a time limit: a hanging driver must not block the doctor.
///
/// `registers` is a drive whose registers are mapped for each GPU. One of them, the drive's capabilities, is read, as
/// its driver does; nothing is written.
pub(super) fn ask(patience: Duration, registers: Option<Address>) -> Cuda {
    let (send, answer) = mpsc::channel();
    let asked = thread::Builder::new().name("cuda".into()).spawn(move || send.send(all(registers)));
    if let Err(error) = asked {
        return Cuda::failed(format!("cannot start a thread to query it: {error}"));
    }
    answer.recv_timeout(patience).unwrap_or_else(|_| {
        Cuda::failed(format!(
            "{LATE} {} ms: it may be starting (nvidia-persistenced keeps it ready) or hanging",
            patience.as_millis()
        ))
    })
}

fn all(registers: Option<Address>) -> Cuda {
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
        let asked: Vec<_> =
            devices.iter().map(|device| scope.spawn(|| gpu(&cuda, device, registers))).collect();
        asked
            .into_iter()
            .zip(&devices)
            .map(|(one, device)| one.join().unwrap_or_else(|_| said(device)))
            .collect()
    });
    Cuda { error: None, version: cuda.version(), gpus }
}

/// CUDA's answers without a trial.
fn said(device: &cuda::Device) -> CudaGpu {
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
        dma_buf_said: device.can.dma_buf,
        ordering: ordering.into(),
        host_flush: device.can.visibility.host_flush,
        copy: None,
        dma_buf: None,
        registers: None,
    }
}

fn gpu(cuda: &cuda::Cuda, device: &cuda::Device, registers: Option<Address>) -> CudaGpu {
    let mut answer = said(device);
    match cuda.open(&device.ordinal.to_string()) {
        Err(error) => answer.copy = Some(Err(error.to_string())),
        Ok(gpu) => {
            answer.copy = Some(copy(&gpu));
            answer.dma_buf = Some(dma_buf(&gpu).map_err(|error| error.to_string()));
            answer.registers = registers.and_then(|drive| register(&gpu, drive));
        }
    }
    answer
}

fn copy(gpu: &cuda::CudaGpu) -> Trial {
    let bytes: Vec<u8> = (0..TRIED as u32).map(|i| (i.wrapping_mul(0x9e37_79b1) >> 24) as u8).collect();
    let back = through(gpu, &bytes).map_err(|error| error.to_string())?;
    match bytes.iter().zip(&back).position(|(sent, got)| sent != got) {
        None => Ok(()),
        Some(at) => Err(format!("byte {at} of {TRIED} came back different from GPU memory")),
    }
}

/// Copies pinned memory to GPU memory by the copy engine, and back.
fn through(gpu: &cuda::CudaGpu, bytes: &[u8]) -> onehop_gpu::Result<Vec<u8>> {
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

fn dma_buf(gpu: &cuda::CudaGpu) -> onehop_gpu::Result<()> {
    let memory = gpu.alloc_device(DeviceKind::Exportable, TRIED)?;
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

/// `None` if the kernel does not let us map the page.
fn register(gpu: &cuda::CudaGpu, drive: Address) -> Option<Registers> {
    let bar = onehop_pci::bar_memory(&Root::here(), drive, Some(0)).ok()?;
    let page = FirstPage(MmioWindow::new(bar.slice(0..4096).ok()?));
    let tried = gpu.map_registers(Arc::new(page)).map(drop).map_err(|error| error.to_string());
    Some(Registers { of: drive.to_string(), tried })
}
