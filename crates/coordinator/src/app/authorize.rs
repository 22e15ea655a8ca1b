//! The one place that decides whether a caller may do something.
//!
//! In this version everybody who belongs to an organization may do everything within it, and nobody anything
//! outside; machines (bearers of `CLOISTER_APP_TOKENS`) have no tokens of their own to manage. Roles come here later,
//! and nowhere else.

use std::fmt;

use cloister_api::access::{RPC_ACCESS, rpc_access};
use cloister_types::{OrganizationId, TokenId, UserId};

use crate::db::{self, AuditContext};
use crate::error::{self, AppError};

macro_rules! actions {
    ($($(#[$doc:meta])* $name:ident = $word:literal,)*) => {
        /// What a caller can ask for; the words are those of the `access` options in `proto/`.
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
        pub enum Action { $($(#[$doc])* $name,)* }

        impl Action {
            /// Every action.
            pub const ALL: &'static [Self] = &[$(Self::$name,)*];

            /// Returns the word, as it stands in the audit log.
            pub fn as_str(self) -> &'static str {
                match self { $(Self::$name => $word,)* }
            }
        }
    };
}

actions! {
    /// Reads the audit log.
    AuditList = "audit.list",
    /// Reads one exec.
    ExecGet = "exec.get",
    /// Reads a session's execs.
    ExecList = "exec.list",
    /// Reads an exec's output.
    ExecRead = "exec.read",
    /// Changes the size of an exec's terminal.
    ExecResize = "exec.resize",
    /// Signals an exec.
    ExecSignal = "exec.signal",
    /// Starts an exec, or takes one up.
    ExecStart = "exec.start",
    /// Waits for an exec.
    ExecWait = "exec.wait",
    /// Writes to an exec's standard input.
    ExecWrite = "exec.write",
    /// Copies files into a session or out of it.
    FileTransfer = "file.transfer",
    /// Reads one host.
    HostGet = "host.get",
    /// Reads the hosts.
    HostList = "host.list",
    /// Connects to a port of a session.
    PortDial = "port.dial",
    /// Creates a session.
    SessionCreate = "session.create",
    /// Deletes a session.
    SessionDelete = "session.delete",
    /// Reads one session.
    SessionGet = "session.get",
    /// Reads the sessions.
    SessionList = "session.list",
    /// Pauses a session.
    SessionPause = "session.pause",
    /// Resumes a session.
    SessionResume = "session.resume",
    /// Follows a session's log.
    SessionWatch = "session.watch",
    /// Creates a token.
    TokenCreate = "token.create",
    /// Reads the caller's tokens.
    TokenList = "token.list",
    /// Revokes a token.
    TokenRevoke = "token.revoke",
    /// Reads who the caller is.
    TokenWhoAmI = "token.whoami",
}

impl Action {
    /// Returns the action of the RPC at `path`; `None` for a path that is no RPC of the app API.
    pub fn of_rpc(path: &str) -> Option<Self> {
        let access = rpc_access(path)?;
        Self::ALL.iter().copied().find(|action| action.as_str() == access.action)
    }

    /// Returns whether some RPC with this action changes something.
    pub fn is_mutation(self) -> bool {
        RPC_ACCESS.iter().any(|access| access.action == self.as_str() && access.mutation)
    }
}

/// Who calls.
#[derive(Clone, PartialEq, Eq)]
pub struct Principal {
    /// The organization.
    pub organization_id: OrganizationId,
    /// Its name.
    pub organization_name: String,
    /// The user for whom the caller acts.
    pub user_id: UserId,
    /// The user's name.
    pub user_name: String,
    /// The token that was shown; `None` for a machine of `CLOISTER_APP_TOKENS`.
    pub token_id: Option<TokenId>,
    /// As it stands in the audit log, for example `usr_…/tok_…`.
    pub label: String,
}

impl fmt::Debug for Principal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Principal").field(&self.label).finish()
    }
}

impl From<db::Principal> for Principal {
    fn from(principal: db::Principal) -> Self {
        let label = format!("{}/{}", principal.user_id, principal.token_id);
        Self {
            organization_id: principal.organization_id,
            organization_name: principal.organization_name,
            user_id: principal.user_id,
            user_name: principal.user_name,
            token_id: Some(principal.token_id),
            label,
        }
    }
}

impl Principal {
    /// Returns the principal of the `number`th machine bearer, which acts for `user`.
    pub(crate) fn machine(user: &Self, number: usize) -> Self {
        Self { token_id: None, label: format!("{}/app-token-{number}", user.user_id), ..user.clone() }
    }

    fn is_machine(&self) -> bool {
        self.token_id.is_none()
    }
}

/// What an action is done to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Resource<'a> {
    /// Objects of the caller's own organization: its sessions, execs, audit log. Operations of the store are bound to
    /// the organization of the [`Authorized`], so that a reference never leads out of it.
    OwnOrganization,
    /// Objects of an organization that is known by id.
    Organization(&'a OrganizationId),
    /// The caller's own tokens.
    OwnTokens,
    /// The deployment's hosts.
    Hosts,
}

/// Where a call comes from and how it names itself.
#[derive(Debug, Clone, Default)]
pub struct Origin {
    /// The caller's request id; empty for a call without one.
    pub request_id: String,
    /// The peer's address.
    pub source: String,
}

/// Proof that a caller may do one thing; only [`authorize`] makes it.
#[derive(Debug, Clone)]
pub struct Authorized {
    principal: Principal,
    context: AuditContext,
}

impl Authorized {
    /// Returns who was authorized.
    pub fn principal(&self) -> &Principal {
        &self.principal
    }

    /// Returns what becomes the audit row.
    pub(crate) fn context(&self) -> &AuditContext {
        &self.context
    }

    pub(crate) fn organization_id(&self) -> &OrganizationId {
        &self.principal.organization_id
    }
}

/// Decides whether `principal` may do `action` to `resource`.
///
/// # Errors
///
/// [`error::PERMISSION_DENIED`]; nothing was looked at.
pub fn authorize(
    principal: &Principal,
    action: Action,
    resource: Resource<'_>,
    origin: Origin,
) -> Result<Authorized, AppError> {
    let within = match resource {
        Resource::OwnOrganization | Resource::OwnTokens | Resource::Hosts => true,
        Resource::Organization(id) => *id == principal.organization_id,
    };
    let allowed = match action {
        Action::TokenCreate | Action::TokenList | Action::TokenRevoke => !principal.is_machine(),
        Action::AuditList
        | Action::ExecGet
        | Action::ExecList
        | Action::ExecRead
        | Action::ExecResize
        | Action::ExecSignal
        | Action::ExecStart
        | Action::ExecWait
        | Action::ExecWrite
        | Action::FileTransfer
        | Action::HostGet
        | Action::HostList
        | Action::PortDial
        | Action::SessionCreate
        | Action::SessionDelete
        | Action::SessionGet
        | Action::SessionList
        | Action::SessionPause
        | Action::SessionResume
        | Action::SessionWatch
        | Action::TokenWhoAmI => true,
    };
    if !(within && allowed) {
        return Err(AppError::new(
            &error::PERMISSION_DENIED,
            format!("`{}` may not do `{}`", principal.label, action.as_str()),
        ));
    }
    Ok(Authorized {
        context: AuditContext {
            organization_id: principal.organization_id.clone(),
            user_id: principal.user_id.clone(),
            principal: principal.label.clone(),
            action: action.as_str().to_owned(),
            request_id: origin.request_id,
            source: origin.source,
        },
        principal: principal.clone(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn principal() -> Principal {
        Principal {
            organization_id: OrganizationId::from_u128(1),
            organization_name: "default".to_owned(),
            user_id: UserId::from_u128(2),
            user_name: "owner".to_owned(),
            token_id: Some(TokenId::from_u128(3)),
            label: "usr/tok".to_owned(),
        }
    }

    /// Proves that no RPC exists that nobody decided about, and no decision without an RPC.
    #[test]
    fn every_rpc_has_an_action_and_every_action_an_rpc() {
        for access in RPC_ACCESS {
            let action =
                Action::of_rpc(access.path).unwrap_or_else(|| panic!("`{}` has no action", access.path));
            assert_eq!(action.as_str(), access.action);
            assert!(!access.mutation || action.is_mutation());
        }
        for action in Action::ALL {
            assert!(
                RPC_ACCESS.iter().any(|access| access.action == action.as_str()),
                "{action:?} has no RPC"
            );
        }
        assert_eq!(Action::of_rpc("/cloister.host.v1.HostLinkService/Control"), None);
    }

    #[test]
    fn nobody_reaches_another_organization_and_machines_no_tokens() {
        let person = principal();
        let machine = Principal::machine(&person, 1);
        let other = OrganizationId::from_u128(9);
        for action in Action::ALL {
            let foreign = authorize(&person, *action, Resource::Organization(&other), Origin::default());
            assert_eq!(foreign.map(|_| ()).map_err(|error| error.code), Err(&error::PERMISSION_DENIED));
            assert!(authorize(&person, *action, Resource::OwnOrganization, Origin::default()).is_ok());
            let by_machine = authorize(&machine, *action, Resource::OwnTokens, Origin::default()).is_ok();
            let of_tokens = matches!(action, Action::TokenCreate | Action::TokenList | Action::TokenRevoke);
            assert_eq!(by_machine, !of_tokens, "{action:?}");
        }
    }
}
