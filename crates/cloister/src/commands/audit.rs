//! `cloister audit`: who changed what.

use clap::Subcommand;
use cloister_api::app::{AuditEntry, ListAuditRequest, ListAuditResponse};

use crate::cli::Invocation;
use crate::client::{self, unary};
use crate::error::CliError;
use crate::terminal::{Table, date};

/// Entries per page.
const PAGE_SIZE: u32 = 500;

/// Show who changed what
#[derive(Debug, Subcommand)]
pub(crate) enum AuditCommand {
    /// List entries, newest first
    List {
        /// Only entries about this id; a name finds nothing, because it may have been of several
        #[arg(long, value_name = "ID")]
        resource: Option<String>,
        /// Most entries to print
        #[arg(long, value_name = "NUMBER", default_value_t = 100)]
        limit: u32,
    },
}

impl AuditCommand {
    /// Does it.
    ///
    /// # Errors
    ///
    /// What the coordinator answered.
    pub(crate) async fn run(self, invocation: &Invocation) -> Result<u8, CliError> {
        let Self::List { resource, limit } = self;
        let limit = usize::try_from(limit).unwrap_or(usize::MAX);
        let client = invocation.client().await?;
        let mut request = ListAuditRequest { resource: resource.unwrap_or_default(), ..Default::default() };
        let mut all = ListAuditResponse::default();
        while all.entries.len() < limit {
            request.page_size = u32::try_from(limit - all.entries.len()).unwrap_or(PAGE_SIZE).min(PAGE_SIZE);
            let page = unary!(client, audit, list_audit_with_options, request.clone(), client::quick())?;
            all.entries.extend(page.entries);
            all.next_page_token.clone_from(&page.next_page_token);
            if page.next_page_token.is_empty() {
                break;
            }
            request.page_token = page.next_page_token;
        }
        invocation.terminal.either(&all, || audit_table(&all.entries))?;
        Ok(0)
    }
}

fn audit_table(entries: &[AuditEntry]) -> String {
    let mut table = Table::new(["ID", "AT", "PRINCIPAL", "ACTION", "RESOURCE", "SOURCE"]);
    for entry in entries {
        table.row([
            entry.id.to_string(),
            date(entry.at.as_option()),
            entry.principal.clone(),
            entry.action.clone(),
            entry.resource.clone(),
            entry.source.clone(),
        ]);
    }
    table.render()
}
