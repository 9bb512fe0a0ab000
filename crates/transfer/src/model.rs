//! A model on a drive: finds it, plans it, and loads it into one arena.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use onehop_drive::{Drive, Moved, Namespace};
use onehop_files::{Blocks, ExtentMap, Which};
use onehop_gpu::Region;
use onehop_load::{Model, OnMaps, OnVolume, Plan, Selection, plan};

use crate::arena::{self, Landed};
use crate::engine::{Engine, TransferSetup, block_bytes};
use crate::error::{Error, Result, was_stopped};
use crate::outcome::TransferOutcome;
use crate::progress::{Progress, check};
use crate::volume;

/// Where a model's files are on a drive.
#[derive(Clone, Copy, Debug)]
pub enum ModelPlace<'a> {
    /// By paths in its file system.
    FileSystem {
        /// Files, indexes and directories, which together are one model.
        paths: &'a [PathBuf],
        /// The partition, if several have a supported file system.
        partition: Option<Which>,
    },
    /// By an extent map, on any file system: these files and directories of it, or all of them if none is named.
    Map {
        /// The file with the maps.
        map: &'a Path,
        /// Paths as in the maps.
        paths: &'a [PathBuf],
    },
}

/// An open model on a drive.
pub struct ModelOnDrive {
    /// Its files and tensors.
    pub model: Arc<Model>,
    /// The file system of its files; `None` for an extent map.
    pub file_system: Option<&'static str>,
    /// How its files were found, in words.
    pub found_by: String,
    maps: Vec<ExtentMap>,
    pub(crate) blocks: Arc<dyn Blocks>,
}

/// Tensors in GPU memory, and how they got there.
pub struct Loaded {
    /// The memory that holds the tensors, each in its planned place.
    pub arena: Region,
    /// How the transfer went; its bytes are those of the tensors.
    pub outcome: TransferOutcome,
    /// Bytes that were read, in whole blocks.
    pub read_bytes: u64,
    /// How the bytes got into the arena.
    pub landed: Landed,
}

impl ModelOnDrive {
    /// Finds a model's files and reads their headers, by the CPU.
    ///
    /// # Errors
    /// When the file system, map or file does not exist, or a file is not a model.
    pub fn open(drive: &Drive, ns: &Namespace, place: ModelPlace<'_>) -> Result<Self> {
        let blocks = volume::blocks(drive, ns)?;
        match place {
            ModelPlace::Map { map, paths } => {
                let maps = volume::read_maps(map, drive, ns)?;
                let store = OnMaps::new(maps.clone(), blocks.clone())?;
                let roots = if paths.is_empty() { store.roots() } else { paths.to_vec() };
                let model = Arc::new(Model::open(&store, &roots)?);
                let found_by = format!("the extent map {}", map.display());
                Ok(Self { model, file_system: None, found_by, maps, blocks })
            }
            ModelPlace::FileSystem { paths, partition } => {
                let volume = volume::open(&blocks, partition)?;
                let name = volume.fs_name();
                let model = Arc::new(Model::open(&OnVolume::new(volume, blocks.clone()), paths)?);
                let found_by = format!("its {name} file system");
                Ok(Self { model, file_system: Some(name), found_by, maps: Vec::new(), blocks })
            }
        }
    }

    /// Plans a load of the selection; [`plan_options`] returns the options for a namespace.
    ///
    /// # Errors
    /// When a tensor cannot be sliced as requested, or the options contradict each other.
    pub fn plan(&self, selection: &Selection, options: plan::PlanOptions) -> Result<Plan> {
        Ok(Plan::new(&self.model, selection, options).map_err(onehop_load::Error::from)?)
    }

    /// Executes a plan, by the requested route or the best that works.
    ///
    /// # Errors
    /// As for [`Engine::open`] and [`arena::fill`].
    pub fn load(&self, setup: &TransferSetup<'_>, plan: &Plan, progress: &dyn Progress) -> Result<Loaded> {
        check(progress)?;
        let (engine, arena) = Engine::open(setup, plan.gpu_bytes.max(1))?;
        let (moved, landed) = arena::fill(&engine, setup.ns, (&self.model, plan), &arena, progress)?;
        let read_bytes = moved.bytes;
        let moved = Moved { bytes: plan.tensor_bytes, ..moved };
        let outcome = TransferOutcome::new(setup.drive, setup.gpu, &engine, &moved, None);
        Ok(Loaded { arena: arena.region, outcome, read_bytes, landed })
    }

    /// Compares the drive with the extent map by which the model was opened, and returns any change since it was made.
    ///
    /// # Errors
    /// When the caller cancels.
    pub fn check_maps(&self, progress: &dyn Progress) -> Result<Option<Error>> {
        for map in &self.maps {
            check(progress)?;
            if let Err(why) = map.verify(&*self.blocks) {
                if was_stopped(&why) {
                    return Err(why.into());
                }
                return Ok(Some(why.into()));
            }
        }
        Ok(None)
    }

    /// What the loaded tensors were compared with, in words.
    #[must_use]
    pub fn compared_by(&self) -> &'static str {
        if self.maps.is_empty() {
            onehop_load::check::BY_FILES
        } else {
            "the drive compared with the map's checksums, and every byte with the drive"
        }
    }
}

/// Plan options for a namespace.
#[must_use]
pub fn plan_options(ns: &Namespace) -> plan::PlanOptions {
    plan::PlanOptions { block: block_bytes(ns), ..plan::PlanOptions::default() }
}

impl Loaded {
    /// Adds the load of another GPU, which came after this one.
    pub fn add(&mut self, other: Self) {
        self.outcome.add(other.outcome);
        self.read_bytes += other.read_bytes;
        self.landed.add(&other.landed);
    }
}
