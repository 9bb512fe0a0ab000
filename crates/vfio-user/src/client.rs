//! The client side of the protocol: an NVMe controller served on a socket, as a backend for the driver.
//!
//! Registers are accessed by messages, or as memory if the server offers that. The controller's memory consists of
//! memfds, which the server maps: neither QEMU nor root is needed.

mod bar;
mod connection;
mod memory;

use std::path::Path;
use std::sync::Arc;

use onehop_os::{ControllerBackend, FunctionReset, Mapper, Registers, StopSignal};

use crate::error::ClientError;
use crate::wire::command;
use bar::Bar0;
use connection::{CONFIG, Connection};
use memory::ClientMemory;

/// Command: memory space, bus master, and no INTx, because interrupts are not used here.
const COMMAND: u64 = 4;
const COMMAND_ON: u16 = 1 << 1 | 1 << 2 | 1 << 10;
/// Class code: mass storage, non-volatile memory, NVM Express.
const CLASS: u64 = 9;
const NVME: [u8; 3] = [0x02, 0x08, 0x01];
/// Device information flag: it can be reset.
const CAN_RESET: u32 = 1;

/// Connects to a server's socket. The path is all that identifies the controller. Once `stop` is set, a server that does
/// not answer is given up within about a second.
///
/// # Errors
/// When nothing is served there, the server refuses a request, or it is not an NVMe controller.
pub fn open(socket: &Path, stop: &StopSignal) -> Result<ControllerBackend, ClientError> {
    let connection = Arc::new(Connection::open(socket, stop)?);
    let class = connection.read(CONFIG, CLASS, NVME.len())?;
    if class != NVME {
        let [interface, sub, base] = [0, 1, 2].map(|i| class.get(i).copied().unwrap_or_default());
        let why = format!("its class is {base:02x}{sub:02x}{interface:02x}, an NVMe controller's 010802");
        return Err(ClientError::Unfit { path: socket.into(), why });
    }
    let info = connection.request(command::DEVICE_INFO, &words([16, 0, 0, 0]), None)?.payload;
    let flags = info.get(4..8).and_then(|raw| raw.try_into().ok()).map_or(0, u32::from_le_bytes);
    let regs: Arc<dyn Registers> = Arc::new(Bar0::open(connection.clone())?);
    turn_on(&connection)?;
    let reset = Arc::new(ClientReset(connection.clone())) as Arc<dyn FunctionReset>;
    let name = connection.name().to_owned();
    let mapper: Arc<dyn Mapper> = Arc::new(ClientMemory::new(connection));
    Ok(ControllerBackend {
        regs,
        mapper,
        reset: (flags & CAN_RESET != 0).then_some(reset),
        name,
        simulated: true,
    })
}

fn words<const N: usize>(words: [u32; N]) -> Vec<u8> {
    words.iter().flat_map(|word| word.to_le_bytes()).collect()
}

fn turn_on(connection: &Connection) -> Result<(), ClientError> {
    connection.write(CONFIG, COMMAND, &COMMAND_ON.to_le_bytes())
}

/// Resets the device by a message. Memory stays mapped; the command register is cleared.
struct ClientReset(Arc<Connection>);

impl FunctionReset for ClientReset {
    fn function_reset(&self) -> onehop_os::Result<()> {
        let reset = self.0.request(command::RESET, &[], None).and_then(|_| turn_on(&self.0));
        reset.map_err(|error| onehop_os::Error::System {
            call: format!("reset of {}", self.0.name()),
            source: std::io::Error::other(error),
            hint: "",
        })
    }
}
