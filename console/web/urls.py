"""The URLs of the pages. Their names have no namespace; names of API routes begin with `api_`.

Names that customers choose come after a letter, as in `d/<slug:name>/`, so that a dataset may have the name `new`.
"""

from django.urls import include, path

from console.serving import notebooks as notebook_hosts
from console.serving import shells as shell_sockets
from console.web import (
    activation,
    audit,
    cards,
    closure,
    costs,
    credit,
    datasets,
    docs,
    images,
    installation,
    invitations,
    invoices,
    job_files,
    job_page,
    jobs,
    metrics,
    notebooks,
    notifications,
    organization,
    overview,
    preferences,
    registries,
    secrets,
    security,
    service_accounts,
    shells,
    status,
    storage,
    sweeps,
    tools,
    trained_models,
    training,
    wallet,
    workspaces,
)
from storage.converters import FILE_ROUTE

ACTIVATION = [
    path("", activation.activation, name="activation"),
    path("deactivate/", activation.deactivate, name="activation_deactivate"),
]
DATASETS = [
    path("", datasets.dataset_list, name="dataset_list"),
    path("new/", datasets.dataset_new, name="dataset_new"),
    path("d/<slug:name>/", datasets.dataset_detail, name="dataset_detail"),
    path("d/<slug:name>/delete/", datasets.dataset_delete, name="dataset_delete"),
    path("accept/", datasets.share_accept, name="dataset_share_accept"),
    path("d/<slug:name>/shares/", datasets.share_new, name="dataset_share_new"),
    path("d/<slug:name>/shares/<int:pk>/revoke/", datasets.share_revoke, name="dataset_share_revoke"),
    path("d/<slug:name>/leave/", datasets.share_leave, name="dataset_share_leave"),
    path("d/<slug:name>/import/", datasets.dataset_import, name="dataset_import"),
    path("d/<slug:name>/copy/", datasets.dataset_copy, name="dataset_copy"),
    path("d/<slug:name>/v/<int:number>/delete/", datasets.version_delete, name="dataset_version_delete"),
    path("d/<slug:name>/v/<int:number>/", datasets.version_detail, name="dataset_version"),
    path(f"d/<slug:name>/v/<int:number>/folder/{FILE_ROUTE}", datasets.version_detail, name="dataset_folder"),
    path(f"d/<slug:name>/v/<int:number>/file/{FILE_ROUTE}", datasets.version_file, name="dataset_file"),
    path(f"d/<slug:name>/v/<int:number>/download/{FILE_ROUTE}", datasets.version_download, name="dataset_download"),
    path(f"d/<slug:name>/v/<int:number>/image/{FILE_ROUTE}", datasets.version_image, name="dataset_image"),
]
MODELS = [
    path("", trained_models.model_list, name="model_list"),
    path("m/<slug:name>/", trained_models.model_detail, name="model_detail"),
    path("m/<slug:name>/delete/", trained_models.model_delete, name="model_delete"),
    path("m/<slug:name>/v/<int:number>/delete/", trained_models.model_version_delete, name="model_version_delete"),
]
JOBS = [
    path("<int:pk>/publish/", trained_models.job_publish, name="job_publish"),
    path("", jobs.job_list, name="job_list"),
    path("csv/", jobs.job_export, name="job_export"),
    path("cancel/", jobs.job_cancel_selected, name="job_cancel_selected"),
    path("tensorboard/", tools.jobs_tensorboard, name="jobs_tensorboard"),
    path("views/", jobs.job_view_save, name="job_view_save"),
    path("views/<int:pk>/delete/", jobs.job_view_delete, name="job_view_delete"),
    path("compare/", metrics.job_compare, name="job_compare"),
    path("compare-selected/", metrics.jobs_compare, name="jobs_compare"),
    path("<int:pk>/metrics/", metrics.job_metrics, name="job_metrics"),
    path("<int:pk>/cost/", metrics.job_cost, name="job_cost"),
    path("<int:pk>/points/", metrics.job_points, name="job_points"),
    path("<int:pk>/points.csv", metrics.job_points_csv, name="job_points_csv"),
    path("<int:pk>/", job_page.job_detail, name="job_detail"),
    path("<int:pk>/tab/<slug:tab>/", job_page.job_tab, name="job_tab"),
    path("<int:pk>/live/", job_page.job_live, name="job_live"),
    path("<int:pk>/stacks/<int:attempt>/", job_page.job_stacks, name="job_stacks"),
    path("<int:pk>/configuration/", jobs.job_configuration, name="job_configuration"),
    path("<int:pk>/edit/", jobs.job_edit, name="job_edit"),
    path("<int:pk>/cancel/", jobs.job_cancel, name="job_cancel"),
    path("<int:pk>/nodes/<int:node>/shell/", shells.job_shell, name="job_shell"),
    path("<int:pk>/tensorboard/", tools.job_tensorboard, name="job_tensorboard"),
    path("<int:pk>/files/", job_files.job_files, name="job_files"),
    path(f"<int:pk>/folder/{FILE_ROUTE}", job_files.job_files, name="job_folder"),
    path(f"<int:pk>/file/{FILE_ROUTE}", job_files.job_file, name="job_file"),
    path(f"<int:pk>/image/{FILE_ROUTE}", job_files.job_picture, name="job_image"),
]
WORKSPACES = [
    path("", workspaces.workspace_list, name="workspace_list"),
    path("imports/", workspaces.workspace_imports_progress, name="workspace_imports"),
    path("new/", workspaces.workspace_new, name="workspace_new"),
    path("w/<slug:name>/", workspaces.workspace_detail, name="workspace_detail"),
    path("w/<slug:name>/delete/", workspaces.workspace_delete, name="workspace_delete"),
    path("w/<slug:name>/new/", workspaces.workspace_new_entry, name="workspace_new_entry"),
    path("w/<slug:name>/move/", workspaces.workspace_move, name="workspace_move"),
    path("w/<slug:name>/copy/", workspaces.workspace_copy_entry, name="workspace_copy_entry"),
    path("w/<slug:name>/existing/", workspaces.workspace_existing, name="workspace_existing"),
    path("w/<slug:name>/delete-entry/", workspaces.workspace_delete_entry, name="workspace_delete_entry"),
    path("w/<slug:name>/search/", workspaces.workspace_search, name="workspace_search"),
    path("w/<slug:name>/bin/", workspaces.workspace_bin, name="workspace_bin"),
    path("w/<slug:name>/bin/empty/", workspaces.workspace_bin_empty, name="workspace_bin_empty"),
    path("w/<slug:name>/bin/<int:pk>/restore/", workspaces.workspace_bin_restore, name="workspace_bin_restore"),
    path("w/<slug:name>/bin/<int:pk>/remove/", workspaces.workspace_bin_remove, name="workspace_bin_remove"),
    path(f"w/<slug:name>/folder/{FILE_ROUTE}", workspaces.workspace_detail, name="workspace_folder"),
    path(f"w/<slug:name>/file/{FILE_ROUTE}", workspaces.workspace_file, name="workspace_file"),
    path(f"w/<slug:name>/picture/{FILE_ROUTE}", workspaces.workspace_picture, name="workspace_picture"),
    path(f"w/<slug:name>/train/{FILE_ROUTE}", workspaces.workspace_train, name="workspace_train"),
    path(f"w/<slug:name>/save/{FILE_ROUTE}", workspaces.workspace_save, name="workspace_save"),
    path(f"w/<slug:name>/download/{FILE_ROUTE}", workspaces.workspace_download, name="workspace_download"),
]
STORAGE = [
    path("", storage.storage_usage, name="storage_usage"),
    path("<slug:kind>/<int:pk>/restore/", storage.storage_restore, name="storage_restore"),
    path("<slug:kind>/<int:pk>/remove/", storage.storage_remove, name="storage_remove"),
    path("runs/<int:pk>/results/", storage.storage_remove_results, name="storage_remove_results"),
]
IMAGES = [
    path("", images.image_list, name="image_list"),
    path("check/", images.image_check, name="image_check"),
    path("new/", images.image_new, name="image_new"),
    path("i/<slug:name>/", images.image_edit, name="image_edit"),
    path("i/<slug:name>/delete/", images.image_delete, name="image_delete"),
]
REGISTRIES = [
    path("", registries.registry_list, name="registry_list"),
    path("<str:host>/delete/", registries.registry_delete, name="registry_delete"),
]
SECRETS = [
    path("", secrets.secret_list, name="secret_list"),
    path("<str:name>/delete/", secrets.secret_delete, name="secret_delete"),
]
TRAINING = [
    path("new/", training.training_new, name="training_new"),
    path("scripts/", training.training_scripts, name="training_scripts"),
    path("script/", training.training_script, name="training_script"),
    path("quote/", training.training_quote, name="training_quote"),
    path("comparison/<uuid:quote_id>/", training.training_comparison, name="training_comparison"),
    path("environment/<uuid:quote_id>/", training.training_environment, name="training_environment"),
    path("probe/", training.training_free_estimate, name="training_free_estimate"),
    path("order/", training.training_order, name="training_order"),
    path("pay/", training.training_pay, name="training_pay"),
    path("paid/<uuid:quote_id>/", training.training_paid, name="training_paid"),
]
NOTEBOOKS = [
    path("", notebooks.notebook_list, name="notebook_list"),
    path("new/", notebooks.notebook_new, name="notebook_new"),
    path("quote/", notebooks.notebook_quote, name="notebook_quote"),
    path("order/", notebooks.notebook_order, name="notebook_order"),
    path("<int:pk>/open/", notebooks.notebook_open, name="notebook_open"),
    path("<int:pk>/extend/", notebooks.notebook_extend, name="notebook_extend"),
    path("<int:pk>/extend/quote/", notebooks.notebook_extend_quote, name="notebook_extend_quote"),
]
SWEEPS = [
    path("", sweeps.sweep_list, name="sweep_list"),
    path("new/", sweeps.sweep_new, name="sweep_new"),
    path("quote/", sweeps.sweep_quote, name="sweep_quote"),
    path("order/", sweeps.sweep_order, name="sweep_order"),
    path("<int:pk>/", sweeps.sweep_detail, name="sweep_detail"),
    path("<int:pk>/importance/", sweeps.sweep_importance, name="sweep_importance"),
    path("<int:pk>/stop/", sweeps.sweep_stop, name="sweep_stop"),
    path("<int:pk>/extend/", sweeps.sweep_extend, name="sweep_extend"),
]
DOCS = [
    path("", docs.docs, name="docs"),
    path("<slug:page>/", docs.docs_page, name="docs_page"),
]
TOOLS = [
    path("<str:key>/<path:rest>", tools.tool, name="tool"),
    path("<str:key>/", tools.tool, {"rest": ""}, name="tool_root"),
]
WALLET = [
    path("", wallet.wallet, name="wallet"),
    path("top-up/", wallet.top_up, name="top_up"),
    path("cards/", cards.card_list, name="card_list"),
    path("cards/add/", cards.card_add, name="card_add"),
    path("cards/default/", cards.card_default, name="card_default"),
    path("cards/remove/", cards.card_remove, name="card_remove"),
    path("cards/automatic-off/", cards.automatic_top_up_off, name="automatic_top_up_off"),
    path("arrival/", wallet.pending_top_up, name="pending_top_up"),
]
RECEIPTS = [
    path("", wallet.receipt_list, name="receipt_list"),
    path("<int:pk>/", wallet.receipt_detail, name="receipt_detail"),
]
COSTS = [
    path("", costs.cost_list, name="cost_list"),
    path("csv/", costs.cost_export, name="cost_export"),
    path("budgets/", costs.budget_set, name="budget_set"),
]
INVOICES = [
    path("", invoices.invoice_list, name="invoice_list"),
    path("new/", invoices.invoice_new, name="invoice_new"),
    path("details/", invoices.billing_details, name="billing_details"),
    path("<int:pk>/", invoices.invoice_detail, name="invoice_detail"),
    path("<int:pk>/pdf/", invoices.invoice_pdf, name="invoice_pdf"),
    path("<int:pk>/csv/", invoices.invoice_csv, name="invoice_csv"),
]
ORGANIZATION = [
    path("audit/", audit.audit_log, name="audit_log"),
    path("", organization.organization, name="organization"),
    path("new/", organization.new, name="organization_new"),
    path("switch/", organization.switch, name="organization_switch"),
    path("rename/", organization.rename, name="organization_rename"),
    path("second-factor/", organization.set_second_factor_required, name="organization_second_factor"),
    path("shells/", organization.set_shells_enabled, name="organization_shells"),
    path("close/", closure.close_organization, name="organization_close"),
    path("close/withdraw/", closure.withdraw, name="organization_close_withdraw"),
    path("export/", closure.export_organization, name="organization_export"),
    path("service-accounts/", service_accounts.account_list, name="organization_service_accounts"),
    path("service-accounts/<int:pk>/", service_accounts.account, name="organization_service_account"),
    path(
        "service-accounts/<int:pk>/state/",
        service_accounts.set_disabled,
        name="organization_service_account_state",
    ),
    path(
        "service-accounts/<int:pk>/delete/",
        service_accounts.delete,
        name="organization_service_account_delete",
    ),
    path(
        "service-accounts/<int:pk>/tokens/<int:token_pk>/revoke/",
        service_accounts.revoke_token,
        name="organization_service_account_token_revoke",
    ),
    path("invitations/", organization.invite, name="organization_invite"),
    path("invitations/<int:pk>/revoke/", organization.revoke_invitation, name="invitation_revoke"),
    path("members/<int:pk>/role/", organization.change_role, name="organization_member_role"),
    path("members/<int:pk>/remove/", organization.remove_member, name="organization_member_remove"),
]
SECURITY = [
    path("", security.security, name="security"),
    path("sessions/end/", security.end_other_sessions, name="security_end_sessions"),
    path("sessions/<int:pk>/end/", security.end_session, name="security_end_session"),
    path("services/<slug:client_id>/end/", security.end_client_access, name="security_end_client_access"),
    path("export/", closure.export_account, name="security_export"),
    path("delete/", closure.delete_account, name="security_delete"),
]
NOTIFICATIONS = [
    path("", notifications.notification_list, name="notification_list"),
    path("mails/", notifications.notification_choices, name="notification_choices"),
]
WEBHOOKS = [
    path("", notifications.webhook_list, name="webhook_list"),
    path("<int:pk>/", notifications.webhook_detail, name="webhook_detail"),
    path("<int:pk>/delete/", notifications.webhook_delete, name="webhook_delete"),
    path("<int:pk>/deliveries/<int:delivery>/", notifications.webhook_send_again, name="webhook_send_again"),
]
BRAND = [
    path("style.css", installation.brand_style, name="brand_style"),
    path("logo.png", installation.brand_logo, name="brand_logo"),
]
INVITATIONS = [
    path("<str:token>/", invitations.invitation, name="invitation"),
    path("<str:token>/accept/", invitations.accept, name="invitation_accept"),
    path("<str:token>/decline/", invitations.decline, name="invitation_decline"),
]
TOKENS = [
    path("", organization.tokens, name="tokens"),
    path("<int:pk>/revoke/", organization.revoke_token, name="token_revoke"),
]

urlpatterns = [
    path("", overview.overview, name="overview"),
    path("service/", include(ACTIVATION)),
    path("datasets/", include(DATASETS)),
    path("models/", include(MODELS)),
    path("jobs/", include(JOBS)),
    path("workspaces/", include(WORKSPACES)),
    path("storage/", include(STORAGE)),
    path("images/", include(IMAGES)),
    path("registries/", include(REGISTRIES)),
    path("secrets/", include(SECRETS)),
    path("training/", include(TRAINING)),
    path("notebooks/", include(NOTEBOOKS)),
    # The server itself calls the two views `admit`, to ask whether a browser may connect; browsers get 404.
    path(notebook_hosts.GATE_PATH.lstrip("/"), notebooks.admit, name="notebook_admit"),
    path(shell_sockets.GATE_PATH.lstrip("/"), shells.admit, name="shell_admit"),
    path("sweeps/", include(SWEEPS)),
    path("status/", status.status, name="status"),
    path("docs/", include(DOCS)),
    path("tools/", include(TOOLS)),
    path("wallet/", include(WALLET)),
    path("receipts/", include(RECEIPTS)),
    path("credit/", credit.credit_list, name="credit_list"),
    path("costs/", include(COSTS)),
    path("invoices/", include(INVOICES)),
    path("organization/", include(ORGANIZATION)),
    path("security/", include(SECURITY)),
    path("notifications/", include(NOTIFICATIONS)),
    path("webhooks/", include(WEBHOOKS)),
    path("brand/", include(BRAND)),
    path("legal/<slug:kind>/", installation.legal_text, name="legal_text"),
    path("time-zone/", preferences.time_zone, name="time_zone"),
    path("invitations/", include(INVITATIONS)),
    path("tokens/", include(TOKENS)),
]
