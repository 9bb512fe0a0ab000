//! NVIDIA's cuFile, if it is installed: it moves bytes between files and GPU memory by paths of its own. Neither
//! building nor starting a program requires it.

use std::ffi::{OsStr, c_int, c_void};
use std::fs::File;
use std::mem::ManuallyDrop;
use std::ops::Range;
use std::os::fd::AsRawFd;
use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use libloading::Library;

use super::context::Context;
use crate::{Error, GpuFile, GpuFiles, Region, Result};

/// Where it may be: the loader's name, then where toolkits install it.
const PLACES: [&str; 4] = [
    "libcufile.so.0",
    "libcufile.so",
    "/usr/local/cuda/lib64/libcufile.so.0",
    "/usr/local/cuda/targets/x86_64-linux/lib/libcufile.so.0",
];
/// CU_FILE_HANDLE_TYPE_OPAQUE_FD
const OPAQUE_FD: c_int = 1;
const WHAT: &str = "moving bytes by cuFile";

/// CUfileError_t
#[repr(C)]
#[derive(Clone, Copy)]
struct CuFileStatus {
    code: c_int,
    cuda: c_int,
}

/// CUfileDescr_t; the descriptor is in a union with a pointer.
#[repr(C)]
struct Description {
    kind: c_int,
    fd: FdPlace,
    operations: *const c_void,
}

#[repr(C)]
union FdPlace {
    fd: c_int,
    _pointer: *mut c_void,
}

const _: () = assert!(size_of::<Description>() == 24 && size_of::<CuFileStatus>() == 8);

type Handle = *mut c_void;

/// The functions that are used.
struct CuFileCalls {
    // SAFETY: types and no calls; each function's contract is what cufile.h says of its name.
    driver_close: unsafe extern "C" fn() -> CuFileStatus,
    register: unsafe extern "C" fn(*mut Handle, *mut Description) -> CuFileStatus,
    deregister: unsafe extern "C" fn(Handle),
    buffer_register: unsafe extern "C" fn(*const c_void, usize, c_int) -> CuFileStatus,
    // SAFETY: as above.
    buffer_deregister: unsafe extern "C" fn(*const c_void) -> CuFileStatus,
    read: unsafe extern "C" fn(Handle, *mut c_void, usize, i64, i64) -> isize,
    write: unsafe extern "C" fn(Handle, *const c_void, usize, i64, i64) -> isize,
    // The functions above are in it. It stays loaded: its threads and their end handlers are in there, too.
    _library: ManuallyDrop<Library>,
}

/// cuFile, started.
struct StartedCuFile {
    calls: CuFileCalls,
    /// The registered memory: where it begins and ends.
    known: Mutex<Vec<(Range<u64>, Weak<CuFileRegistration>)>>,
    /// The context of the memory; none for a model of cuFile, whose memory is the host's.
    context: Option<Arc<Context>>,
}

/// cuFile for one GPU. Clones are the same.
#[derive(Clone)]
pub(super) struct CuFile(Arc<StartedCuFile>);

fn refused(why: impl Into<String>) -> Error {
    Error::NotSupported { what: WHAT.into(), why: why.into() }
}

impl CuFileStatus {
    fn check(self, call: &str) -> Result<()> {
        match self {
            Self { code: 0, .. } => Ok(()),
            Self { code, cuda } => {
                let by_cuda = if cuda == 0 { String::new() } else { format!(", CUDA error {cuda}") };
                Err(refused(format!("{call} failed with {code}{by_cuda}{}", hint(code))))
            }
        }
    }
}

/// Hints for some of its errors.
fn hint(code: c_int) -> &'static str {
    match code {
        5001 => {
            ": nvidia-fs is not loaded, and copying through host memory is switched off (allow_compat_mode)"
        }
        5004 => ": nvidia-fs is of another version",
        5008 => ": it does not take files of this file system",
        5011 => ": CUDA refused it",
        5012..=5017 => ": it does not take this memory",
        5019 => ": it does not take files that were opened with such flags",
        5020 => ": the file has to be opened with O_DIRECT",
        5027 => {
            ": it could not make out the file's device; udev has to know it (ID_FS_USAGE, /run/udev in containers)"
        }
        5028 => ": it has this file already",
        _ => "; its log (cufile.log, or CUFILE_LOGFILE_PATH) says more",
    }
}

impl CuFile {
    /// Finds and starts it.
    pub(super) fn load(context: Option<Arc<Context>>, place: Option<&Path>) -> Result<Self> {
        let places: Vec<&OsStr> = match place {
            Some(place) => vec![place.as_os_str()],
            None => PLACES.iter().map(OsStr::new).collect(),
        };
        let mut why = String::new();
        for place in places {
            // SAFETY: cuFile's initialisers only set up cuFile itself. One that is started is never unloaded.
            match unsafe { Library::new(place) } {
                Ok(library) => return Self::start(library, context),
                Err(error) if why.is_empty() => why = super::loader_words(&error),
                Err(_) => {}
            }
        }
        Err(refused(format!(
            "there is no libcufile ({why}); it comes with NVIDIA's CUDA toolkit (gds-tools, libcufile)"
        )))
    }

    fn start(library: Library, context: Option<Arc<Context>>) -> Result<Self> {
        /// A function of this name and type.
        fn get<F: Copy>(library: &Library, name: &str) -> Result<F> {
            // SAFETY: the symbol is a C function of cuFile, and every caller below asks for its documented signature.
            let symbol = unsafe { library.get::<F>(name.as_bytes()) };
            symbol.map(|symbol| *symbol).map_err(|_| refused(format!("libcufile has no {name}")))
        }
        type Start = unsafe extern "C" fn() -> CuFileStatus;
        let open: Start = get(&library, "cuFileDriverOpen")?;
        let calls = CuFileCalls {
            driver_close: get::<Start>(&library, "cuFileDriverClose_v2")
                .or_else(|_| get(&library, "cuFileDriverClose"))?,
            register: get(&library, "cuFileHandleRegister")?,
            deregister: get(&library, "cuFileHandleDeregister")?,
            buffer_register: get(&library, "cuFileBufRegister")?,
            buffer_deregister: get(&library, "cuFileBufDeregister")?,
            read: get(&library, "cuFileRead")?,
            write: get(&library, "cuFileWrite")?,
            _library: ManuallyDrop::new(library),
        };
        // SAFETY: it takes nothing. The driver is the process's: cufile.h has it count who opened it, and close it with the last
        // of them. It is closed once, when the result is dropped.
        within(context.as_deref(), || unsafe { open() })?.check("cuFileDriverOpen")?;
        Ok(Self(Arc::new(StartedCuFile { calls, known: Mutex::default(), context })))
    }
}

/// Makes a call in the memory's context.
fn within<R>(context: Option<&Context>, call: impl FnOnce() -> R) -> Result<R> {
    match context {
        Some(context) => context.call(WHAT, |_| Ok(call())),
        None => Ok(call()),
    }
}

impl StartedCuFile {
    fn known(&self) -> MutexGuard<'_, Vec<(Range<u64>, Weak<CuFileRegistration>)>> {
        self.known.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Refuses memory of other GPUs than the one that cuFile was started for.
    fn check(&self, memory: &Region) -> Result<()> {
        self.context.as_ref().map_or(Ok(()), |context| context.check_own(WHAT, memory))
    }

    /// Memory as cuFile expects it: the start of a registration, or else cuFile uses a buffer of its own, and the
    /// distance from there. The registration stays as long as the third value lives.
    fn place(&self, memory: &Region) -> (*mut c_void, i64, Option<Arc<CuFileRegistration>>) {
        let at = memory.addr().0;
        let end = at.saturating_add(memory.len() as u64);
        let known = self.known();
        let mut around = known.iter().filter(|(range, _)| range.start <= at && end <= range.end);
        let found = around.find_map(|(range, held)| Some((range.start, held.upgrade()?)));
        let (base, held) = found.map_or((at, None), |(base, held)| (base, Some(held)));
        (base as *mut c_void, (at - base) as i64, held)
    }
}

impl Drop for StartedCuFile {
    fn drop(&mut self) {
        let close = self.calls.driver_close;
        // SAFETY: it was opened once by `start`, and every handle and buffer of it is gone: each holds an Arc of this.
        // cuFile counts other users in this process.
        let _ = within(self.context.as_deref(), || unsafe { close() });
    }
}

impl GpuFiles for CuFile {
    fn open(&self, file: Arc<File>) -> Result<Box<dyn GpuFile>> {
        let mut handle = std::ptr::null_mut();
        let mut description = Description {
            kind: OPAQUE_FD,
            fd: FdPlace { fd: file.as_raw_fd() },
            operations: std::ptr::null(),
        };
        let register = self.0.calls.register;
        // SAFETY: both live across the call; the file stays open as long as the handle is registered.
        within(self.0.context.as_deref(), || unsafe { register(&mut handle, &mut description) })?
            .check("cuFileHandleRegister")?;
        Ok(Box::new(OpenCuFile { handle, cufile: self.clone(), _file: file }))
    }

    fn register(&self, memory: &Region) -> Result<Box<dyn Send + Sync>> {
        self.0.check(memory)?;
        let (at, bytes, register) =
            (memory.addr().0 as *const c_void, memory.len(), self.0.calls.buffer_register);
        // SAFETY: the region is memory of this context's GPU, and is kept until it is taken back.
        within(self.0.context.as_deref(), || unsafe { register(at, bytes, 0) })?
            .check("cuFileBufRegister")?;
        let registration = Arc::new(CuFileRegistration { cufile: self.clone(), memory: memory.clone() });
        let range = memory.addr().0..memory.addr().0 + bytes as u64;
        self.0.known().push((range, Arc::downgrade(&registration)));
        Ok(Box::new(CuFileMemory(registration)))
    }

    fn how(&self) -> &'static str {
        if Path::new("/proc/driver/nvidia-fs").exists() {
            "nvidia-fs is loaded"
        } else {
            "nvidia-fs is not loaded: unless cuFile uses the kernel's P2PDMA, it copies through host memory"
        }
    }
}

/// Registered memory, owned by its registrant.
struct CuFileMemory(Arc<CuFileRegistration>);

impl Drop for CuFileMemory {
    fn drop(&mut self) {
        // No call uses it from now on.
        let own = Arc::downgrade(&self.0);
        self.0.cufile.0.known().retain(|(_, known)| !known.ptr_eq(&own));
    }
}

/// The registration, also held by each call that uses it.
struct CuFileRegistration {
    cufile: CuFile,
    memory: Region,
}

impl Drop for CuFileRegistration {
    fn drop(&mut self) {
        let (at, started) = (self.memory.addr().0 as *const c_void, &self.cufile.0);
        let deregister = started.calls.buffer_deregister;
        // SAFETY: it was registered at this address, and no call uses it any more: each holds it until it returns.
        let _ = within(started.context.as_deref(), || unsafe { deregister(at) });
    }
}

/// A file registered with cuFile.
struct OpenCuFile {
    handle: Handle,
    cufile: CuFile,
    _file: Arc<File>,
}

// SAFETY: a handle is a number that any thread may use; cuFile documents its calls as safe between threads.
unsafe impl Send for OpenCuFile {}
// SAFETY: as above.
unsafe impl Sync for OpenCuFile {}

impl OpenCuFile {
    /// Checks the result of a call. The call is made in here, so that nothing changes `errno` before it is read.
    fn moved(&self, call: &str, f: impl FnOnce() -> isize) -> Result<usize> {
        let (result, system) = within(self.cufile.0.context.as_deref(), || {
            let result = f();
            (result, std::io::Error::last_os_error())
        })?;
        match result {
            moved if moved >= 0 => Ok(moved as usize),
            -1 => Err(refused(format!("{call}: {system}"))),
            code => {
                let code = code.unsigned_abs() as c_int;
                Err(refused(format!("{call} failed with {code}{}", hint(code))))
            }
        }
    }
}

impl GpuFile for OpenCuFile {
    fn read(&self, into: &Region, at: u64) -> Result<usize> {
        let started = &self.cufile.0;
        started.check(into)?;
        let (read, (base, offset, _held), bytes) = (started.calls.read, started.place(into), into.len());
        // SAFETY: the region is memory of this context's GPU that lives across the call, which ends when the bytes are there; so does
        // the registration that it lies in, if there is one.
        self.moved("cuFileRead", || unsafe { read(self.handle, base, bytes, at as i64, offset) })
    }

    fn write(&self, from: &Region, at: u64) -> Result<usize> {
        let started = &self.cufile.0;
        started.check(from)?;
        let (write, (base, offset, _held), bytes) = (started.calls.write, started.place(from), from.len());
        // SAFETY: as for `read`.
        self.moved("cuFileWrite", || unsafe { write(self.handle, base, bytes, at as i64, offset) })
    }
}

impl Drop for OpenCuFile {
    fn drop(&mut self) {
        let (started, handle) = (&self.cufile.0, self.handle);
        let deregister = started.calls.deregister;
        // SAFETY: it was registered once, and nobody uses it any more.
        let _ = within(started.context.as_deref(), || unsafe { deregister(handle) });
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use std::io::Write;
    use std::path::PathBuf;
    use std::process::Command;

    use onehop_os::{DmaMemory, HostMem};
    use onehop_proto::GpuAddr;

    use super::*;
    use crate::Place;

    /// A model of cuFile whose GPU memory is the host's.
    const MODEL: &str = r#"
        #include <stdlib.h>
        #include <unistd.h>
        #include <errno.h>
        typedef struct { int err, cu_err; } answer;
        typedef struct { int type; union { int fd; void *handle; } u; const void *ops; } description;
        static int buffers, handles;
        static volatile int reading;
        static const void *base;
        answer cuFileDriverOpen(void) { return (answer){0, 0}; }
        answer cuFileDriverClose(void) { if (buffers || handles) abort(); return (answer){0, 0}; }
        answer cuFileHandleRegister(void **h, description *d) {
            if (d->type != 1 || d->ops) return (answer){5008, 0};
            int *fd = malloc(sizeof *fd); *fd = d->u.fd; *h = fd; handles++; return (answer){0, 0};
        }
        void cuFileHandleDeregister(void *h) { handles--; free(h); }
        answer cuFileBufRegister(const void *p, size_t n, int flags) {
            if (n > 1 << 20) return (answer){5011, 801};
            buffers++; base = p; return (answer){0, 0};
        }
        answer cuFileBufDeregister(const void *p) { if (reading) abort(); buffers--; base = 0; return (answer){0, 0}; }
        ssize_t cuFileRead(void *h, void *p, size_t n, off_t at, off_t to) {
            if (at == 1) { errno = EIO; return -1; }
            if (at == 2) return -5020;
            if (at == 3) { reading = 1; usleep(200000); reading = 0; return buffers && p == base ? 0 : -5012; }
            if (buffers && p != base) return -5012;
            return pread(*(int *)h, (char *)p + to, n, at);
        }
        ssize_t cuFileWrite(void *h, const void *p, size_t n, off_t at, off_t from) {
            return pwrite(*(int *)h, (const char *)p + from, n, at);
        }
    "#;

    fn model(folder: &Path) -> Option<PathBuf> {
        let (source, library) = (folder.join("model.c"), folder.join("libmodel.so"));
        std::fs::write(&source, MODEL).unwrap();
        let made = Command::new("cc").args(["-shared", "-fPIC", "-o"]).arg(&library).arg(&source).status();
        if made.is_ok_and(|status| status.success()) {
            return Some(library);
        }
        let _ = std::io::stderr().write_all(b"SKIPPED: a C compiler (cc) is not installed\n");
        None
    }

    fn region(bytes: usize) -> Region {
        let mem = HostMem::anonymous(bytes).unwrap();
        let at = GpuAddr(mem.host_ptr() as u64);
        Region::on_host(Place::Vram, at, mem, Arc::new(()))
    }

    #[test]
    fn it_is_called_as_its_header_says() {
        let folder = std::env::temp_dir().join(format!("onehop-cufile-{}", std::process::id()));
        std::fs::create_dir_all(&folder).unwrap();
        let Some(library) = model(&folder) else { return };
        let path = folder.join("data");
        std::fs::write(&path, (0..=255).cycle().take(8192).collect::<Vec<u8>>()).unwrap();
        let cufile = CuFile::load(None, Some(&library)).unwrap();
        let file = Arc::new(File::options().read(true).write(true).open(&path).unwrap());
        let (opened, memory) = (cufile.open(file).unwrap(), region(4096));
        let registered = cufile.register(&memory).unwrap();
        assert_eq!(opened.read(&memory, 7).unwrap(), 4096);
        assert_eq!(memory.host().unwrap().to_vec(0, 4).unwrap(), [7, 8, 9, 10]);
        let failed = [opened.read(&memory, 1), opened.read(&memory, 2)].map(|r| r.unwrap_err().to_string());
        assert!(failed[0].contains("nput/output") && failed[1].contains("O_DIRECT"), "{failed:?}");
        memory.fill(0, 4096, 0xee).unwrap();
        assert_eq!(opened.write(&memory, 4096).unwrap(), 4096);
        // A part of registered memory is named by the start of the whole.
        assert_eq!(opened.read(&memory.slice(1024..1040).unwrap(), 256).unwrap(), 16);
        assert_eq!(memory.host().unwrap().to_vec(1023, 4).unwrap(), [0xee, 0, 1, 2]);
        assert_eq!(std::fs::read(&path).unwrap()[4095..4098], [255, 0xee, 0xee]);
        let refused = cufile.register(&region(2 << 20)).err().unwrap().to_string();
        assert!(refused.contains("5011, CUDA error 801"), "{refused}");
        // A registration dropped during a read stays until the read has ended.
        std::thread::scope(|scope| {
            let reading = scope.spawn(|| opened.read(&memory, 3));
            std::thread::sleep(std::time::Duration::from_millis(50));
            drop(registered);
            assert_eq!(reading.join().unwrap().unwrap(), 0);
        });
        drop((opened, cufile));
        // RTLD_NOW and RTLD_NOLOAD: it is opened only if it is loaded.
        // SAFETY: the model's initialisers do nothing.
        let loaded = unsafe { libloading::os::unix::Library::open(Some(&library), 2 | 4) };
        assert!(loaded.is_ok(), "its threads would go on in code that is unloaded");
        std::fs::remove_dir_all(&folder).unwrap();
    }

    #[test]
    fn a_missing_library_is_reported() {
        let error = CuFile::load(None, Some(Path::new("/nowhere/libcufile.so"))).err().unwrap().to_string();
        assert!(error.contains("no libcufile") && error.contains("/nowhere"), "{error}");
    }
}
