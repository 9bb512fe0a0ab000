//! Models on servers: `http(s)://` and `s3://`, by range requests that detect a changed object.
//!
//! An object's tag is fetched when it is opened; every read requests that tag and compares it with the answer.
//! Interrupted reads are continued a limited number of times.

mod file;

use std::collections::HashMap;
use std::ffi::OsString;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use futures_util::StreamExt;
use object_store::aws::AmazonS3Builder;
use object_store::http::HttpBuilder;
use object_store::path::Path as Location;
use object_store::{ClientOptions, ObjectStore, RetryConfig};
use tokio::runtime::Runtime;
use url::Url;

use crate::error::{Error, Result};
use crate::source::{Kind, Source, Store};
use file::{ReadFailure, RemoteFile, in_time};

/// Upper limit of objects below a prefix.
const MAX_NAMES: usize = 1 << 20;

/// Settings for servers.
#[derive(Clone, Debug)]
pub struct Config {
    /// S3 settings, by the lower-case names of AWS's environment variables: `aws_region`, `aws_endpoint`,
    /// `aws_access_key_id`, `aws_skip_signature` …
    pub s3: Vec<(String, String)>,
    /// Time limit for a connection.
    pub connect: Duration,
    /// Time limit without any new byte.
    pub idle: Duration,
    /// Number of retries of a read.
    pub retries: u32,
    /// Setting it cancels all waits for a server.
    pub stopped: Arc<AtomicBool>,
}

impl Default for Config {
    fn default() -> Self {
        let (connect, idle) = (Duration::from_secs(10), Duration::from_secs(30));
        Self { s3: Vec::new(), connect, idle, retries: 5, stopped: Arc::default() }
    }
}

/// Access to servers.
pub struct Remote {
    runtime: Arc<Runtime>,
    config: Config,
    /// One for each server or bucket, because it keeps connections.
    stores: Mutex<HashMap<String, Arc<dyn ObjectStore>>>,
}

/// A parsed address.
struct ObjectAddress {
    store: Arc<dyn ObjectStore>,
    location: Location,
    /// Whether the server lists objects below a prefix.
    lists: bool,
}

impl Remote {
    /// Starts the threads that serve connections.
    ///
    /// # Errors
    /// When a thread cannot be started.
    pub fn new(config: Config) -> Result<Self> {
        let runtime =
            tokio::runtime::Builder::new_multi_thread().enable_all().thread_name("connections").build();
        let runtime = Arc::new(runtime.map_err(Error::Thread)?);
        Ok(Self { runtime, config, stores: Mutex::default() })
    }

    fn address(&self, path: &Path) -> Result<ObjectAddress> {
        let name = path.display().to_string();
        let bad = |why: String| Error::Address { file: name.clone(), why };
        let url = Url::parse(&name).map_err(|e| bad(e.to_string()))?;
        let location = Location::from_url_path(url.path()).map_err(|e| bad(e.to_string()))?;
        let (key, lists) = match url.scheme() {
            "http" | "https" => {
                let mut base = url.clone();
                base.set_path("/");
                (base.to_string(), false)
            }
            "s3" => (format!("s3://{}", url.host_str().unwrap_or_default()), true),
            other => return Err(bad(format!("{other}:// is not read; http, https and s3 are"))),
        };
        let mut stores = self.stores.lock().unwrap_or_else(PoisonError::into_inner);
        let store = match stores.get(&key) {
            Some(store) => store.clone(),
            None => {
                let store = self.store(&url, &key).map_err(|e| bad(e.to_string()))?;
                stores.insert(key, store.clone());
                store
            }
        };
        Ok(ObjectAddress { store, location, lists })
    }

    fn store(&self, url: &Url, key: &str) -> object_store::Result<Arc<dyn ObjectStore>> {
        let config = &self.config;
        // Timeouts are enforced here: a large range may take long.
        let client = ClientOptions::new().with_timeout_disabled().with_connect_timeout(config.connect);
        let once = RetryConfig { max_retries: 0, ..RetryConfig::default() };
        if url.scheme() != "s3" {
            let client = client.with_allow_http(url.scheme() == "http");
            let http = HttpBuilder::new().with_url(key).with_client_options(client).with_retry(once);
            return Ok(Arc::new(http.build()?));
        }
        let mut s3 = AmazonS3Builder::new()
            .with_client_options(client)
            .with_bucket_name(url.host_str().unwrap_or_default())
            .with_retry(once);
        for (name, value) in &config.s3 {
            // Unknown names are ignored, as by AWS's own tools.
            if let Ok(name) = name.parse() {
                s3 = s3.with_config(name, value);
            }
        }
        Ok(Arc::new(s3.build()?))
    }

    fn file(&self, path: &Path, address: &ObjectAddress) -> Result<RemoteFile> {
        let (runtime, store) = (self.runtime.clone(), address.store.clone());
        let name = path.display().to_string();
        RemoteFile::open(name, runtime, store, address.location.clone(), self.config.clone())
    }

    /// Calls `each` for every object below a prefix, until it returns false.
    fn walk(
        &self,
        path: &Path,
        address: &ObjectAddress,
        mut each: impl FnMut(&Location) -> bool,
    ) -> Result<()> {
        let prefix = Some(&address.location).filter(|location| !location.as_ref().is_empty());
        let file = path.display().to_string();
        let mut objects = address.store.list(prefix);
        let go_on = || !self.config.stopped.load(Ordering::Relaxed);
        for _ in 0..MAX_NAMES {
            let next = self.runtime.block_on(in_time(objects.next(), self.config.idle, &go_on));
            let Some(object) = next.map_err(|why| why.error(&file, 1))? else { return Ok(()) };
            let object = object.map_err(|why| ReadFailure::from(why).error(&file, 1))?;
            if !each(&object.location) {
                return Ok(());
            }
        }
        Err(Error::Crowded { directory: file, most: MAX_NAMES })
    }

    fn is_prefix(&self, path: &Path, address: &ObjectAddress) -> Result<bool> {
        let mut found = false;
        self.walk(path, address, |_| {
            found = true;
            false
        })?;
        Ok(found)
    }
}

impl Store for Remote {
    fn kind(&self, path: &Path) -> Result<Kind> {
        let address = self.address(path)?;
        if address.location.as_ref().is_empty() {
            if address.lists && self.is_prefix(path, &address)? {
                return Ok(Kind::Directory);
            }
            let why = "it names a server, and no file on it".into();
            return Err(Error::Address { file: path.display().to_string(), why });
        }
        match self.file(path, &address) {
            Ok(_) => Ok(Kind::File),
            Err(error) if address.lists && error.is_not_found() && self.is_prefix(path, &address)? => {
                Ok(Kind::Directory)
            }
            Err(error) => Err(error),
        }
    }

    fn names(&self, path: &Path) -> Result<Vec<OsString>> {
        let address = self.address(path)?;
        let mut names = Vec::new();
        self.walk(path, &address, |location| {
            let mut parts = location.prefix_match(&address.location).into_iter().flatten();
            if let (Some(name), None) = (parts.next(), parts.next()) {
                names.push(name.as_ref().into());
            }
            true
        })?;
        Ok(names)
    }

    fn open(&self, path: &Path) -> Result<Box<dyn Source>> {
        let address = self.address(path)?;
        Ok(Box::new(self.file(path, &address)?))
    }
}
